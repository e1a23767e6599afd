"""The pages of the KV cache: who holds them, which prefixes they keep, and how far ahead they are reserved."""
