"""Trust: checks that a replay is right."""
