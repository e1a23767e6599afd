"""`phonograph bench NAME`: the measurements, and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phonograph.errors import PlanError

_DEFAULT_SECONDS = 900.0


@dataclass(frozen=True)
class MeasurementCommand:
    """A measurement by name; its module has SUBJECT and measure(bench)."""

    name: str
    help: str
    flags: tuple[str, ...] = ()


MEASUREMENTS = (
    MeasurementCommand("decode_step", "a steady decode step at several batch sizes", ("batches", "context", "steps")),
    MeasurementCommand(
        "throughput", "tokens/s of W1, latencies of a mix with Poisson arrivals", ("rates", "seconds", "runs")
    ),
    MeasurementCommand(
        "prefill", "a prefill step by tokens, requests and prefix", ("tokens", "requests", "prefixes", "rounds")
    ),
    MeasurementCommand("capture", "seconds and bytes to record all default buckets"),
    MeasurementCommand("cold_start", "from process start to first token, part by part", ("cold",)),
    MeasurementCommand("breaks", "graphs with gaps against one graph", ("tokens", "rounds")),
    MeasurementCommand("host_time", "what the host pays for a step", ("batches", "rounds")),
)
"""The most important first."""
BY_NAME = {measurement.name: measurement for measurement in MEASUREMENTS}


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add every measurement to the commands of `phonograph bench`, and `all` and `table`."""
    for measurement in MEASUREMENTS:
        parser = _added(subparsers, measurement.name, measurement.help, _run_one)
        parser.set_defaults(measurement=measurement.name)
        _add_common_flags(parser)
        parser.add_argument("--out", type=Path, help="a folder for NAME.json and NAME.svg")
        parser.add_argument(
            "--time-limit", type=float, default=_DEFAULT_SECONDS, help="seconds after which no new case is begun"
        )
        for flag in measurement.flags:
            parser.add_argument(f"--{flag}", **_FLAGS[flag])
    _add_all(subparsers)
    _add_table(subparsers)


def _added(
    subparsers: argparse._SubParsersAction[Any], name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(benchmark=run)
    return parser


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="random weights of this shape; default: qwen3-8b, and tiny for --quick")
    parser.add_argument("--device", help="cuda, cpu or emulated; default: the accelerator present, else the CPU")
    parser.add_argument("--quick", action="store_true", help="a tiny shape and few rounds: shows that it works")
    parser.add_argument("--backends", type=_words, default=(), help="graph backends to compare, the main one first")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an engine option; may be repeated"
    )
    parser.add_argument(
        "--model-impl",
        dest="option",
        action="append",
        type="model_impl={}".format,
        metavar="native|hf",
        help="layers of our own (default), or those of transformers, with the same random weights",
    )
    peers = parser.add_argument_group("peers, measured in the same run where --out has no result of theirs yet")
    peers.add_argument("--peers", type=Path, metavar="DIR", help="a folder with packs of other engines")
    peers.add_argument("--transformers", action="store_true", help="transformers' continuous batching (minutes)")
    peers.add_argument("--compile", action="store_true", help="transformers under torch.compile (minutes)")


def _add_all(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = _added(subparsers, "all", "every measurement, the most important first, within a time limit", _run_all)
    _add_common_flags(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder for all results, written as they come")
    parser.add_argument("--minutes", type=float, default=25.0, help="time for all together (default 25)")
    parser.add_argument("--only", type=_words, default=(), help="just these, separated by commas, in this order")
    parser.add_argument("--cold", action="store_true", help="start with a cold kernel cache too")


def _add_table(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = _added(subparsers, "table", "tables and plots from results, as Markdown or into a page", _run_table)
    parser.add_argument("folder", type=Path, help="where the results are")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="fill the sections <!-- bench: NAME --> of a page")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw a plot of each measurement into this folder")


def _run_one(args: argparse.Namespace) -> int:
    from phonograph.bench.run_one import run_measurement

    flags = {flag: getattr(args, flag) for flag in BY_NAME[args.measurement].flags}
    return run_measurement(args, flags)


def _run_all(args: argparse.Namespace) -> int:
    from phonograph.bench.run_all import run_all

    names = args.only or tuple(BY_NAME)
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise PlanError(f"--only {unknown[0]}: expected some of {', '.join(BY_NAME)}.")
    return run_all(args, names)


def _run_table(args: argparse.Namespace) -> int:
    from phonograph.bench.report_pages import make_pages

    return make_pages(args.folder, args.into, args.plots)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(word) for word in text.split(","))
    if any(size < 0 for size in sizes):
        raise ValueError
    return sizes


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


_FLAGS: dict[str, dict[str, Any]] = {
    "batches": {"type": _sizes, "help": "sequences that decode together, separated by commas"},
    "cold": {"action": "store_true", "default": None, "help": "also with a cold cache of compiled kernels"},
    "context": {"type": int, "help": "tokens of context at the first timed step (default 462)"},
    "prefixes": {"type": _sizes, "help": "tokens of cached prefix, separated by commas (default 0,1024)"},
    "rates": {"type": _numbers, "help": "requests a second of the mix, separated by commas (default 4,16,32)"},
    "requests": {"type": _sizes, "help": "requests that share a step, separated by commas (default 1,8)"},
    "rounds": {"type": int, "help": "timed calls of each case"},
    "runs": {"type": int, "help": "runs of W1, of which the last counts (default 2)"},
    "seconds": {"type": float, "help": "seconds during which requests of the mix arrive (default 20)"},
    "steps": {"type": int, "help": "timed steps (default 100)"},
    "tokens": {"type": _sizes, "help": "tokens of a step, all requests together, separated by commas"},
}
