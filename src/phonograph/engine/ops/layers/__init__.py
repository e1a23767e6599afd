"""Layer kernels: in torch, for any device, and in C++; and candidates for computing a product."""
