"""`phonograph bench NAME`: which measurements there are, their flags, and how one is run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phonograph.errors import PhonographError, PlanError

if TYPE_CHECKING:
    from phonograph.bench.setup import Setup

_DEFAULT_SECONDS = 900.0


@dataclass(frozen=True)
class Measurement:
    """A measurement by name; its module has SUBJECT and measure(bench)."""

    name: str
    help: str
    flags: tuple[str, ...] = ()


MEASUREMENTS = (
    Measurement("decode_step", "a steady decode step at several batch sizes", ("batches", "context", "steps")),
    Measurement("throughput", "tokens/s of W1, latencies of a mix with Poisson arrivals", ("rates", "seconds", "runs")),
    Measurement(
        "prefill", "a prefill step by tokens, requests and prefix", ("tokens", "requests", "prefixes", "rounds")
    ),
    Measurement("capture", "seconds and bytes to record all default buckets"),
)
"""The most important first."""
BY_NAME = {measurement.name: measurement for measurement in MEASUREMENTS}


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add every measurement to the commands of `phonograph bench`."""
    for measurement in MEASUREMENTS:
        parser = subparsers.add_parser(
            measurement.name, help=measurement.help, description=measurement.help, allow_abbrev=False
        )
        parser.set_defaults(benchmark=run, measurement=measurement.name)
        _add_common_flags(parser)
        for flag in measurement.flags:
            text, read = _FLAGS[flag]
            parser.add_argument(f"--{flag}", type=read, help=text)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the file; status 1 if it failed."""
    from phonograph.bench.report import Report, machine
    from phonograph.bench.setup import Bench
    from phonograph.bench.tables import printed
    from phonograph.bench.timing import Deadline
    from phonograph.devices import open_device

    device = open_device(args.device)
    setup = _setup(args, device.torch_device.type)
    module = import_module(f"phonograph.bench.{args.measurement}")
    report = Report(module.SUBJECT, _settings(setup, device.name), machine(device.torch_device), setup.out)
    if setup.quick:
        report.note("a quick run: it shows that the measurement works, and says nothing about speed")
    bench = Bench(setup, device, report, Deadline(args.time_limit))
    try:
        with _threads(1 if setup.quick else None):
            module.measure(bench)
    except PhonographError as error:
        report.note(f"failed: {error}")
    except Exception as error:
        report.note(f"failed: {type(error).__name__}: {error}")
        report.finish("failed")
        raise
    failed = any(note.startswith("failed") for note in report.notes)
    left_out = any(note.startswith("not measured") for note in report.notes)
    report.finish("failed" if failed else "partial" if left_out else "complete")
    print(printed(report))
    return 1 if failed else 0


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Threads of torch's CPU ops: tiny ones are slower on many, above all on a machine that is busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="random weights of this shape; default: qwen3-8b, and tiny for --quick")
    parser.add_argument("--device", help="cuda, cpu or emulated; default: the accelerator present, else the CPU")
    parser.add_argument("--quick", action="store_true", help="a tiny shape and few rounds: shows that it works")
    parser.add_argument("--backends", type=_words, default=(), help="graph backends to compare, the main one first")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an engine option; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="a folder for NAME.json")
    parser.add_argument(
        "--time-limit", type=float, default=_DEFAULT_SECONDS, help="seconds after which no new case is begun"
    )


def _setup(args: argparse.Namespace, device_type: str) -> Setup:
    from phonograph.bench.setup import Setup, shape_named

    quick = args.quick or (device_type == "cpu" and args.shape is None)
    shape = shape_named(args.shape or ("tiny" if quick else "qwen3-8b"))
    flags = {flag: getattr(args, flag) for flag in BY_NAME[args.measurement].flags}
    return Setup(shape, quick, args.backends, dict(_option(text) for text in args.option), flags, args.out)


def _settings(setup: Setup, device: str) -> dict[str, Any]:
    given = {name: value for name, value in setup.flags.items() if value is not None}
    return {"shape": setup.shape, "device": device, **{k: str(v) for k, v in setup.options.items()}, **given}


def _option(text: str) -> tuple[str, Any]:
    """An engine option as it is written on the command line; JSON where it is JSON, else a text."""
    from phonograph.engine.options import EngineOptions

    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    known = [field.name for field in fields(EngineOptions)]
    if not equals or name not in known:
        raise PlanError(f"--option {text!r}: expected NAME=VALUE with one of {', '.join(known)}.")
    if name == "dtype":
        return name, _dtype(value)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _dtype(text: str) -> Any:
    import torch

    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if text not in known:
        raise PlanError(f"--option dtype={text}: expected one of {', '.join(known)}.")
    return known[text]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(word) for word in text.split(","))
    if not sizes or any(size < 0 for size in sizes):
        raise ValueError
    return sizes


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


_FLAGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "batches": ("sequences that decode together, separated by commas", _sizes),
    "context": ("tokens of context at the first timed step (default 462)", int),
    "steps": ("timed steps (default 100)", int),
    "tokens": ("tokens of a prefill step, all requests together, separated by commas", _sizes),
    "requests": ("requests that share the step, separated by commas (default 1,8)", _sizes),
    "prefixes": ("tokens of cached prefix, separated by commas (default 0,1024)", _sizes),
    "rounds": ("timed steps and requests of each case (default 10)", int),
    "rates": ("requests a second of the mix, separated by commas (default 4,16,32)", _numbers),
    "seconds": ("seconds during which requests of the mix arrive (default 20)", float),
    "runs": ("runs of W1, of which the last counts (default 2)", int),
}
