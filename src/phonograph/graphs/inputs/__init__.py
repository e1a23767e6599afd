"""Inputs: slots, the pool of their buffers, and the registry that alone writes them."""
