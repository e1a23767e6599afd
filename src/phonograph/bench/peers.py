"""Peers: other engines, measured on the same machine: their packs are found, their scripts run, their results read.

A folder of peers holds, for each, `peer_NAME.py CONFIG_FOLDER RESULT.json` and `NAME_pack.tar.xz`, a folder NAME of
Python packages to run it with; and a folder with config.json for every shape. `extras_pack.tar.xz` has what a machine
may lack. The result is a flat JSON object: up_s, decode_ms_bs8, prefill_ms_128, W1_tok_s, …
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from phonograph.bench.processes import Done, run_command
from phonograph.bench.report import Report, Row, machine, write_json
from phonograph.bench.timing import Deadline
from phonograph.errors import PhonographError, PlanError

_SECONDS = 480.0
_UNPACK_SECONDS = 120.0
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Peer:
    """How an engine is run."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)
    """Folders of its pack that it looks for below the home folder."""


PEERS = (
    Peer("vllm", {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}),
    Peer("sglang", {"CUDA_HOME": "/usr/local/cuda"}, {"tvm-ffi-cache": ".cache/tvm-ffi"}),
)


def measure_peers(args: argparse.Namespace, shape: str, out: Path, seconds: float) -> dict[str, str]:
    """Measure the peers that flags name and that have no result in `out` yet; returns what went wrong, by name."""
    out, deadline = out.resolve(), Deadline(seconds)
    runs: dict[str, Callable[[float], Done]] = {}
    if args.peers is not None:
        folder = args.peers.resolve()
        found = [peer for peer in PEERS if (folder / f"peer_{peer.name}.py").exists()]
        if not found:
            raise PlanError(f"--peers {folder}: no peer_NAME.py of {', '.join(peer.name for peer in PEERS)} is there.")
        runs |= {peer.name: partial(_run_pack, peer, folder, shape, out) for peer in found}
    for what, name in (("batching", "transformers"), ("compile", "compile")):
        if getattr(args, name):
            runs[name] = partial(_run_transformers, what, name, shape, out)
    problems: dict[str, str] = {}
    for name, run in runs.items():
        if _result_path(out, name).exists():
            continue
        if deadline.is_past:
            problems[name] = "not measured, out of time"
            continue
        try:
            _keep(out, name, run(min(deadline.left, _SECONDS)))
        except PhonographError as error:
            problems[name] = str(error)
    return problems


def _keep(out: Path, name: str, done: Done) -> None:
    """Write what a peer found, with the machine it was found on."""
    raw = _raw_path(out, name)
    if done.failure or not raw.exists():
        raise PhonographError(done.failure or "no result was written")
    content = {"peer": name, "machine": machine(), "seconds": round(done.seconds, 1)}
    write_json(_result_path(out, name), {**content, "figures": json.loads(raw.read_text())})


def _run_transformers(what: str, name: str, shape: str, out: Path, seconds: float) -> Done:
    raw = _raw_path(out, name)
    command = [sys.executable, "-m", "phonograph.bench.transformers_peer", shape, str(raw), what]
    return run_command(command, seconds=seconds, log=out / f"peer_{name}.log")


def _run_pack(peer: Peer, folder: Path, shape: str, out: Path, seconds: float) -> Done:
    """Unpack and run."""
    config = folder / shape
    if not (config / "config.json").exists():
        raise PhonographError(f"{config} has no config.json for the shape {shape!r}")
    work = _unpacked(peer, folder, out / "peers")
    raw = _raw_path(out, peer.name)
    return run_command(
        [sys.executable, str(folder / f"peer_{peer.name}.py"), str(config), str(raw)],
        seconds=seconds,
        log=out / f"peer_{peer.name}.log",
        environment={**peer.environment, "PYTHONPATH": str(work / peer.name)},
    )


def _result_path(out: Path, name: str) -> Path:
    return out / f"peer_{name}.json"


def _raw_path(out: Path, name: str) -> Path:
    """What the script itself writes; there is none before it has run."""
    path = out / "peers" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _unpacked(peer: Peer, folder: Path, work: Path) -> Path:
    """A folder with the peer's packages, unpacked if they were not, or the given one if it has them unpacked."""
    if (folder / peer.name).is_dir():
        return folder
    if (work / peer.name).is_dir():
        return work
    work.mkdir(parents=True, exist_ok=True)
    log = work / f"{peer.name}.log"
    for pack in (f"{peer.name}_pack", "extras_pack"):
        # The tools, since Python's tarfile takes minutes for such a pack.
        packed = folder / f"{pack}.tar.xz"
        done = run_command(
            ["sh", "-c", 'xz -dc "$1" | tar xf - -C "$2"', "sh", str(packed), str(work)],
            seconds=_UNPACK_SECONDS,
            log=log,
        )
        if done.failure:
            raise PhonographError(f"unpacking {packed}: {done.failure}")
    if (work / "preflight.py").exists():
        command = [sys.executable, "preflight.py", peer.name, "extras"]
        done = run_command(command, seconds=_UNPACK_SECONDS, log=log, folder=work)
        if done.failure:
            raise PhonographError(f"preparing {peer.name}: {done.failure}")
    for source, target in peer.caches.items():
        if (work / source).is_dir():
            shutil.copytree(work / source, Path.home() / target, dirs_exist_ok=True)
    return work


def results_in(out: Path) -> dict[str, Figures]:
    """What peers found, by name, where a folder has results."""
    found = {}
    for path in sorted(out.glob("peer_*.json")):
        content = json.loads(path.read_text())
        found[content["peer"]] = content["figures"]
    return found


def join(report: Report, results: Mapping[str, Figures]) -> None:
    """Add the peers' figures to the cases that they belong to, in place of those that it had."""
    report.rows = [row for row in report.rows if row.kind != "peer"]
    for name, figures in results.items():
        report.rows += _rows(report, name, figures)


def _rows(report: Report, name: str, figures: Figures) -> Iterator[Row]:
    cases = {tuple(row.case.items()): row.case for row in report.rows}
    for case in cases.values():
        key = _key(report.subject.name, case)
        if key in figures:
            yield Row(case, name, "peer", figures[key])


def _key(measurement: str, case: Mapping[str, int | str]) -> str:
    """The name that peers' scripts give to the figure of a case; empty for one that they don't measure."""
    if measurement == "decode_step" and case["by"] == "slope":
        return f"decode_ms_bs{case['seqs']}"
    if measurement == "prefill" and case["by"] == "end to end" and (case["requests"], case["prefix"]) == (1, 0):
        return f"prefill_ms_{case['tokens']}"
    if measurement == "throughput" and case["workload"] == "W1":
        return "W1_tok_s"
    if measurement == "cold_start" and case["part"] == "all":
        return "up_s"
    return ""
