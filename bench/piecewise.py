"""Backends side by side, natively: decode, prefill, W1, capture and compile seconds, each in processes of its own.

Run: python bench/piecewise.py [--shape qwen3-8b] [--only full breakable tc_eager tc_inductor] > lines.jsonl
     python bench/piecewise.py --quick --shape tiny --device emulated --only full breakable tc_eager
Where steps are wanted and not starts, `--plan` with a few buckets and `--guard off` leave out most of the time.
Inductor is started twice: with a new folder of compiled code (`cold`, the start alone), and with what
that left there (`warm`, all measurements). Prints a line of JSON for each process (bench/one_engine.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from phonograph.settings import environment

ENGINE = Path(__file__).with_name("one_engine.py")
PLANS = {
    "full": ["decode.backend=full", "prefill.backend=full"],
    "breakable": ["decode.backend=breakable", "prefill.backend=breakable"],
    "tc_eager": ["decode.backend=tc_piecewise", "prefill.backend=tc_piecewise", "tc_compiler=eager"],
    "tc_inductor": ["decode.backend=tc_piecewise", "prefill.backend=tc_piecewise", "tc_compiler=inductor"],
    "disabled": ["decode.backend=disabled", "prefill.backend=disabled"],
}


def measured(label: str, name: str, args: argparse.Namespace, variables: Mapping[str, str], *more: str) -> None:
    """One process, whose line is printed; one that fails is a line too."""
    command = [sys.executable, str(ENGINE), label, "--shape", args.shape, "--device", args.device]
    command += [
        "--options",
        json.dumps(args.options),
        "--plan",
        *PLANS[name],
        *args.plan,
        *(("--guard", args.guard) if args.guard else ()),
        *(("--quick",) if args.quick else ()),
        *more,
    ]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment(variables), stdout=subprocess.PIPE, text=True, check=False, timeout=args.seconds
        )
        line = done.stdout.splitlines()[-1] if done.returncode == 0 else json.dumps({"failed": done.returncode})
    except subprocess.TimeoutExpired:
        line = json.dumps({"failed": "time limit"})
    print(json.dumps({"label": label, **json.loads(line), "process_s": time.perf_counter() - begin}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=PLANS, default=list(PLANS)[:4])
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    parser.add_argument("--plan", nargs="*", default=[], help="further settings of every plan: decode.buckets=[1,32] …")
    parser.add_argument("--guard", help="refuse, report or off")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most that one process may take")
    args = parser.parse_args()
    for name in args.only:
        if name != "tc_inductor":
            measured(name, name, args, {})
            continue
        with tempfile.TemporaryDirectory() as folder:
            variables = {"TORCHINDUCTOR_CACHE_DIR": folder}
            measured(f"{name} cold", name, args, variables, "--start-only")
            measured(f"{name} warm", name, args, variables)


if __name__ == "__main__":
    main()
