"""Recording: warm-ups, capture, and what trial runs find of a body; the backends."""
