"""What a layer does on the CPU, in C++."""
