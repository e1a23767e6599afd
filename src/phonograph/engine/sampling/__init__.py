"""Arithmetic between logits and the sampler."""
