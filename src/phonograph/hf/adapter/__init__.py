"""Adapter: any causal language model of transformers, unmodified, as a model of the engine."""
