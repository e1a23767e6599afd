"""The sampler in Triton, for GPUs."""
