"""Inputs: slots, the pool of their buffers, and the registry, their only writer."""
