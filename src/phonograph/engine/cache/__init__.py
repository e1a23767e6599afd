"""Cache: what the layers of a model keep of the tokens before."""
