"""`phonograph bench`: measurements that users can repeat."""

from __future__ import annotations

import argparse

from phonograph import bench
from phonograph.bench.serving import command as bench_serve

HELP = "measure steps, throughput, capture, start, and endpoints under load"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their flags."""
    subparsers = parser.add_subparsers(required=True, metavar="NAME")
    bench.add_commands(subparsers)
    bench_serve.add_command(subparsers)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    status: int = args.benchmark(args)
    return status
