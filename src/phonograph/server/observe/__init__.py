"""Observation: metrics, status page, and the data for both."""
