"""Sampling: from logits to tokens; penalties, masks, and samplers in torch, C++ and Triton."""
