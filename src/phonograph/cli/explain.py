"""`phonograph explain`: the plan, without loading weights."""

from __future__ import annotations

import argparse

from phonograph.cli.flags import add_engine_flags
from phonograph.graphs.flags import asked_from

HELP = "print the plan without loading weights"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print every setting with its source and reason."""
    from phonograph.devices import open_device
    from phonograph.engine.sizing import plan_for

    device = open_device(args.device)
    print(plan_for(device, asked_from(args), on_cpu_by_default=args.device in (None, "cpu")).explain())
    return 0
