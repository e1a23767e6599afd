"""`phonograph COMMAND`: the entry point, which runs a command and turns errors into messages."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from phonograph import __version__, interrupts
from phonograph.cli import bench, chat, doctor, explain, generate, run_batch, serve, verify
from phonograph.errors import PhonographError

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "run-batch": run_batch,
    "explain": explain,
    "verify": verify,
    "bench": bench,
    "doctor": doctor,
}


_NO_READER = 141
"""The exit status of what a closed pipe ended, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _lost_its_reader(sys.stdout):
            raise
        _discard(sys.stdout)  # whoever read the output has seen enough
        return _NO_READER
    except OSError as error:
        if not _takes_no_more(sys.stdout):
            raise
        _discard(sys.stdout)
        print(f"phonograph: writing the output: {error.strerror or error}", file=sys.stderr)
        return 2


def _lost_its_reader(stream: TextIO) -> bool:
    """Whether it is a pipe that nobody reads: else it was another one that broke."""
    try:
        watched = select.poll()
        watched.register(stream, 0)  # what is wrong with it is told unasked
        return any(found & (select.POLLERR | select.POLLHUP) for _, found in watched.poll(0))
    except (OSError, ValueError):
        return False


def _takes_no_more(stream: TextIO) -> bool:
    """Whether it can't be written, as on a full disk: else it was another file that failed."""
    try:
        stream.write("\n")  # what failed without a buffer left nothing to flush
        stream.flush()
    except OSError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Let what is left of it go nowhere: Python would try to write that once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(argv: Sequence[str] | None) -> int:
    try:
        _open_closed_streams()
        args = command_line().parse_args(argv)
        status: int = args.run(args)
    except PhonographError as error:
        print(f"phonograph: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after a bar that was being drawn
        return interrupts.STATUS
    return status


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed: else the next file or socket would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python's sign of a closed descriptor
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def command_line() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="phonograph", allow_abbrev=False, description="Records an LLM's forward pass once and replays it."
    )
    parser.add_argument("--version", action="version", version=f"phonograph {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.add_flags(added)
        added.set_defaults(run=command.run)
    return parser
