"""Native: the C++ source of what a layer does on the CPU, and its library."""
