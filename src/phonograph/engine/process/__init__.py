"""Engine process: an engine core in a process of its own, and the front that talks with it."""
