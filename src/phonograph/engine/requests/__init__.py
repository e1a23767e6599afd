"""Requests: the user's request, the sequences made of it, and the steps that serve them. No torch."""
