"""Cache: holders of pages and rows, prefixes that are kept, and what the layers of a model keep in a page."""
