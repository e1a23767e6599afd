"""Phases: forward passes as data, the sizes and axes that are recorded, and the ambient context of a run."""
