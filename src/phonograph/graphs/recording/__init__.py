"""Recording: warm-ups, capture, saving and restoring state around trial runs, and the backends."""
