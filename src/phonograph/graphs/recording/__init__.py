"""Recording: warm-ups, capture, the state that trial runs find, and the backends."""
