"""Models: the protocol, the registry of families, and the dense family."""
