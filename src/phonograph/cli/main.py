"""`phonograph COMMAND`: finds the command and turns errors into messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from phonograph.cli import bench, chat, explain, generate, serve
from phonograph.errors import PhonographError

COMMANDS = {"generate": generate, "chat": chat, "serve": serve, "explain": explain, "bench": bench}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except PhonographError as error:
        print(f"phonograph: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phonograph", allow_abbrev=False, description="Records an LLM's forward pass once and replays it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.add_flags(added)
        added.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
