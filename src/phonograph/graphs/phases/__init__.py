"""Phases: what is recorded and for which sizes and axes, and what runs right now."""
