"""Execution: planned steps become forward passes, of sizes that memory allows."""
