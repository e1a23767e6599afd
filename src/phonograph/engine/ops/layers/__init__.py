"""Kernels of a layer in torch, for any device, and in C++; and the ways of computing a product."""
