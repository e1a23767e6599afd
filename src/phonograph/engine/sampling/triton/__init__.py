"""Triton sampler: for GPUs."""
