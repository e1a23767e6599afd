"""Phases: forward passes as data, the sizes and axes that are recorded, and what runs right now."""
