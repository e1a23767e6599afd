"""The arithmetic of a layer: a protocol, the torch reference for any device, and faster implementations for some."""
