"""Trust: verification that a replay is right."""
