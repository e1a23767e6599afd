"""Benchmarks: measurements that anyone can repeat: floors, eager, every backend and peers in one run."""

from phonograph.bench.commands import add_commands

__all__ = ["add_commands"]
