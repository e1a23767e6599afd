"""Attention over the paged KV cache: a protocol, the torch reference for any device, Triton kernels for GPUs."""
