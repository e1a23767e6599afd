"""Sampling: tokens from logits; penalties, masks, and samplers in torch, C++ and Triton."""
