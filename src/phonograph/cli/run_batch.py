"""`phonograph run-batch`: a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from phonograph import interrupts
from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.errors import PlanError
from phonograph.graphs.progress import bar
from phonograph.numbers import expect_whole

if TYPE_CHECKING:
    from phonograph.server.batch.files import Done
    from phonograph.server.batch.progress import BatchProgress
    from phonograph.server.batch.running import Tally

HELP = "answer a file of requests in OpenAI's batch format"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input", required=True, help="requests as JSON, one a line; - reads standard input")
    files.add_argument("-o", "--output", required=True, help="where responses go, as they finish; - is standard output")
    files.add_argument(
        "--resume", action="store_true", help="continue an output file: requests that it answers are skipped"
    )
    files.add_argument("--overwrite", action="store_true", help="overwrite an existing output file")
    files.add_argument("--max-in-flight", type=int, help="requests in flight at a time; default: twice --max-seqs")
    files.add_argument("--served-name", action="append", default=[], help="the model's name in requests; repeatable")
    files.add_argument("--max-line-bytes", type=int, default=8 << 20, help="a longer line fails (default 8 MiB)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer all lines; 1 if some failed."""
    try:
        from phonograph.server.batch.files import Done, count_lines, resumed
        from phonograph.server.batch.progress import BatchProgress
    except ImportError as error:
        raise PlanError(
            f"answering a batch: the package {error.name} is missing. Run: pip install 'phonograph[server]'"
        ) from None
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if args.max_in_flight is not None:
        expect_whole("--max-in-flight", args.max_in_flight, PlanError, least=1)
    expect_whole("--max-line-bytes", args.max_line_bytes, PlanError, least=1)
    _refuse_overwriting(args)
    with _opened(args.input, "rb", 0, "--input") as given:
        _refuse_own_input(given, args.output)
        done = resumed(Path(args.output)) if args.resume else Done()
        progress = BatchProgress(sys.stderr, count_lines(Path(args.input)) if Path(args.input).is_file() else None)
        opened = _opened(args.output, "ab" if args.resume else "wb", 1, "--output")
        with opened as output, interrupts.left_to_asyncio():
            tally = asyncio.run(_answered(args, given, output, done, progress))
    return 1 if tally.failed else 0


async def _answered(
    args: argparse.Namespace, given: BinaryIO, output: BinaryIO, done: Done, progress: BatchProgress
) -> Tally:
    from phonograph.engine.process.async_llm import AsyncLLM
    from phonograph.server.app import create_app
    from phonograph.server.batch.files import numbered_lines
    from phonograph.server.batch.running import BatchRun
    from phonograph.server.options import ServerOptions

    # Stored responses could not be retrieved here: they are in the file.
    options = ServerOptions(names=tuple(args.served_name), max_body_bytes=args.max_line_bytes, response_store_bytes=0)
    llm = AsyncLLM(arguments_from(args), max_queue=options.max_queue)
    app = create_app(llm, options)
    try:
        about = await llm.start(bar())
        most = args.max_in_flight or 2 * about.limits.max_seqs
        work = BatchRun(app, output, most=most, done=done, report=progress.report, progress=progress.show)
        how = "stopped (--resume continues)"
        try:
            lines, is_file = numbered_lines(given, args.max_line_bytes), Path(args.input).is_file()
            await work.run(lines, llm.lost(), waits=not is_file)
            how = "done"
        finally:
            progress.end(work.tally, how)
    finally:
        await llm.stop()
    return work.tally


def _refuse_overwriting(args: argparse.Namespace) -> None:
    """Hours of results must not be lost by repeating a command line."""
    if args.resume and (args.overwrite or args.output == "-"):
        other = "--overwrite" if args.overwrite else "--output -"
        raise PlanError(f"--resume continues a file, which {other} excludes. Leave one of them out.")
    path = Path(args.output)
    if args.output == "-" or args.resume or args.overwrite or not path.is_file() or not path.stat().st_size:
        return
    raise PlanError(
        f"{args.output} has responses already. Continue it (--resume), replace it (--overwrite), or name "
        "another --output."
    )


def _refuse_own_input(given: BinaryIO, output: str) -> None:
    """Opening the output would empty the file that requests are read from, by whatever name it has."""
    with contextlib.suppress(OSError):  # there is no output yet, or it can't be had, which opening it says
        found = os.stat(output)
        if output != "-" and stat.S_ISREG(found.st_mode) and os.path.samestat(os.fstat(given.fileno()), found):
            raise PlanError(f"--output {output} is the file that requests are read from. Name another --output.")


@contextlib.contextmanager
def _opened(name: str, mode: str, standard: int, flag: str) -> Iterator[BinaryIO]:
    """The file, or the descriptor that `-` stands for, which is not closed: a thread may still wait in it."""
    try:
        file = open(standard if name == "-" else name, mode, closefd=name != "-")  # noqa: SIM115
    except OSError as error:
        raise PlanError(f"{flag} {name}: {error.strerror or error}. Name another file.") from None
    with contextlib.nullcontext() if name == "-" else file:
        yield file  # type: ignore[misc]
