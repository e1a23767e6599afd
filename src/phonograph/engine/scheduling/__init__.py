"""Scheduling: which sequences a step computes. No torch."""
