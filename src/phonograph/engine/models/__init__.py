"""Models: one dense decoder family, by hand."""
