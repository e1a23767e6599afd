"""Execution: from planned steps to forward passes, and how large they may be."""
