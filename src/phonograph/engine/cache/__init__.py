"""Cache: who holds which page and row, which prefixes are kept, and what the layers of a model keep in a page."""
