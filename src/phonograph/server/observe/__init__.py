"""Observation: metrics, status page, and what they are fed with."""
