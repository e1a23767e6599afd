"""Scheduling: the sequences that a step computes. No torch."""
