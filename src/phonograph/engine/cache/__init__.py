"""Cache: allocation of KV pages and batch rows, the prefix cache, and what the layers of a model store in a page."""
