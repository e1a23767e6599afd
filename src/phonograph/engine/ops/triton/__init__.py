"""Triton kernels: for GPUs, each call of the protocol in as few launches as the shape allows."""
