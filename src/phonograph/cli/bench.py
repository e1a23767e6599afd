"""`phonograph bench`: measurements that anybody can repeat."""

from __future__ import annotations

import argparse

from phonograph.cli import bench_serve

HELP = "measure an endpoint"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What can be measured."""
    bench_serve.add_command(parser.add_subparsers(required=True, metavar="WHAT"))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    status: int = args.benchmark(args)
    return status
