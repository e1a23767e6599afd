"""`phonograph verify`: record a model's forward passes and check every recording against eager."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.errors import PlanError
from phonograph.graphs.progress import bar

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.process.arguments import EngineArguments

HELP = "record a model, and check every recording against eager and for values of its sample"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_engine_flags(parser)
    parser.add_argument("--replay", metavar="FILE", help="instead, run the batch of a reproducer from --shadow-dir")
    parser.set_defaults(verify="all")


def run(args: argparse.Namespace) -> int:
    """Print a table of all recordings; 1 where a check failed, or there was nothing to check."""
    from phonograph.engine.execution.startup_verification import guard_recordings, verify_recordings

    if args.verify == "off":
        raise PlanError("verifying with --verify off checks nothing. Leave it out, or use fast or all.")
    arguments = arguments_from(args)
    arguments = replace(arguments, options=replace(arguments.options, verify="off"))
    if args.replay is not None:
        return _replayed(arguments, Path(args.replay))
    progress = bar()
    llm = arguments.open(progress)
    found = verify_recordings(llm.executor, args.verify, llm.reports, progress)
    if not found:
        print(f"phonograph: nothing is recorded on {llm.where}. Use --device emulated, or a GPU.", file=sys.stderr)
        return 1
    guarded = guard_recordings(llm.executor, args.verify, progress)
    captured = sum(report.seconds for report in llm.reports)
    for name, report in found.items():
        print(f"{name}: {report.summary} ({report.seconds:.2f} s)\n{report.table()}")
        print("\n".join([*str(report).splitlines()[1:], ""]))
    print("".join(f"{name}: {report}\n" for name, report in guarded.items()), end="")
    missing = list(_missing(llm))
    print("".join(f"{line}\n" for line in missing), end="")
    num_failed = sum(len(report.failures) for report in found.values())
    num_checks, seconds = sum(len(one.checks) for one in found.values()), sum(one.seconds for one in found.values())
    print(f"{num_checks} checks, {num_failed} failed, in {seconds:.2f} s; capture took {captured:.2f} s")
    is_ok = all(report.ok for report in found.values()) and all(report.ok for report in guarded.values())
    return 0 if is_ok and not missing else 1


def _missing(llm: LLM) -> Iterator[str]:
    """Phases that should be recorded and have no recording, so that there is nothing to check."""
    for name, runner in llm.executor.runners.items():
        if runner.selection is not None and not runner.captured:
            failures = runner.report.failures if runner.report is not None else ()
            why = f"; the first: {failures[0].error}" if failures else ""
            yield f"{name}: nothing is recorded, so nothing was checked: {len(failures)} captures failed{why}"


def _replayed(arguments: EngineArguments, path: Path) -> int:
    """Report whether the batch of a reproducer is computed wrongly here too, and where; 1 if so, 2 if inconclusive.

    The file is read and compared with the model's configuration before the weights are loaded.
    """
    from phonograph.engine.execution.reproducer import Reproducer
    from phonograph.engine.execution.rerun import rerun

    kept = Reproducer.read(path)
    kept.check_model(arguments.checkpoint().config)
    found = rerun(arguments.open(bar()).executor, kept)
    for line in str(found).splitlines():
        print(f"{path}: {line}")
    if not found.is_verdict:
        return 2
    return 0 if found.mismatch is None else 1
