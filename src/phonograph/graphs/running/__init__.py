"""Running: the runner, and the recordings that serve it."""
