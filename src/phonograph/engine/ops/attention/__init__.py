"""Attention over the paged KV cache: in torch, for any device, in C++, in Triton, and through FlashInfer."""
