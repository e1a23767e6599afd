"""Requests: what is asked for, the sequences made of it, and the steps that serve them. No torch."""
