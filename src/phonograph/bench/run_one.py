"""Measurement run: opens the device, measures, compares with peers, and leaves table, JSON and plot."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from phonograph.bench.measurement import Bench, MeasurementSettings, checked_shape, free_device_memory
from phonograph.bench.peers import join, measure_peers, results_in
from phonograph.bench.plots import draw
from phonograph.bench.report import Report, machine
from phonograph.bench.tables import printed
from phonograph.bench.timing import Deadline
from phonograph.devices import open_device
from phonograph.engine.options import EngineOptions
from phonograph.errors import PhonographError, PlanError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def run_measurement(args: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    """Measure what `args.measurement` names; status 1 if it failed."""
    device = open_device(args.device)
    settings = _measurement_settings(args, flags, device.torch_device.type)
    module = import_module(f"phonograph.bench.{args.measurement}")
    report = Report(module.SUBJECT, _settings_shown(settings, device.name), machine(device), settings.out)
    if settings.quick:
        report.note("a quick run: it shows that the measurement works, and says nothing about speed")
    bench = Bench(settings, device, report, Deadline(args.time_limit))
    try:
        with _threads(1 if settings.quick else torch.get_num_threads()):
            module.measure(bench)
    except Exception as error:
        report.note(f"failed: {type(error).__name__}: {error}")
        report.finish("failed")
        print(printed(report))
        raise
    free_device_memory(device)
    _compare(args, settings, bench)
    left_out = any(note.startswith("not measured") for note in report.notes)
    report.finish("partial" if left_out else "complete")
    if not settings.quick:
        _draw(report)
    print(printed(report))
    return 0


def _measurement_settings(args: argparse.Namespace, flags: Mapping[str, Any], device_type: str) -> MeasurementSettings:
    """On the CPU it is a quick run unless a shape was named."""
    quick = args.quick or (device_type == "cpu" and args.shape is None)
    shape = checked_shape(args.shape or ("tiny" if quick else "qwen3-8b"))
    return MeasurementSettings(
        shape, quick, args.backends, dict(_option(text) for text in args.option), flags, args.out
    )


def _settings_shown(settings: MeasurementSettings, device: str) -> dict[str, Any]:
    given = {name: value for name, value in settings.flags.items() if value is not None}
    return {"shape": settings.shape, "device": device, **{k: str(v) for k, v in settings.options.items()}, **given}


def _option(text: str) -> tuple[str, Any]:
    """An engine option as it is written on the command line; JSON where it is JSON, else a text."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    known = [field.name for field in fields(EngineOptions)]
    if not equals or name not in known:
        raise PlanError(f"--option {text!r}: expected NAME=VALUE with one of {', '.join(known)}.")
    if name in ("dtype", "residual_dtype"):
        if value not in _DTYPES:
            raise PlanError(f"--option {text!r}: expected one of {', '.join(_DTYPES)}.")
        return name, _DTYPES[value]
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Threads of torch's CPU ops: tiny ones are slower on many, above all on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(args: argparse.Namespace, settings: MeasurementSettings, bench: Bench) -> None:
    """Measure the peers that flags name, and join all results of the folder with ours."""
    with tempfile.TemporaryDirectory() as temporary:
        out = settings.out or Path(temporary)
        for name, problem in measure_peers(args, settings.shape, out, bench.deadline.left).items():
            bench.report.note(f"{name} was not measured: {problem}")
        join(bench.report, results_in(out))


def _draw(report: Report) -> None:
    """Next to the JSON file; without the library that draws, a note says so."""
    if report.path is None or not report.rows:
        return
    try:
        draw(report, report.path.with_suffix(".svg"))
    except PhonographError as error:
        report.note(str(error))
