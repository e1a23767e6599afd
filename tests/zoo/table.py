"""Table: what became of every animal, printed. Run `PYTHONPATH=src:tests python tests/zoo/table.py [device]`."""

from __future__ import annotations

import gc
import sys
import time

from phonograph import open_device
from zoo.every import BUGS, CORRECT
from zoo.judge import alarm, judge, names_it


def main() -> None:
    gc.disable()
    device = open_device(sys.argv[1] if len(sys.argv) > 1 else "emulated")
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for animal in sorted(BUGS, key=lambda one: one.mechanism.value):
        if (
            animal.kills_gpu if device.name == "cuda" else animal.needs_gpu
        ) or wanted not in animal.make.__module__ + "." + animal.name:
            continue
        begun = time.perf_counter()
        verdict = judge(animal, device)
        unnamed = "" if names_it(animal, verdict) else "UNNAMED "
        mark = "" if bool(animal.open_on(device.name)) == (not verdict.is_caught or bool(unnamed)) else "!! "
        seconds = time.perf_counter() - begun
        print(f"{mark}{animal.mechanism.value[:28]:<28} {animal.name:<36} {seconds:5.2f} {unnamed}{verdict!s:.300}")
    for animal in CORRECT:
        if (
            animal.kills_gpu if device.name == "cuda" else animal.needs_gpu
        ) or wanted not in animal.make.__module__ + "." + animal.name:
            continue
        begun = time.perf_counter()
        told = alarm(animal, device)
        mark = "" if bool(animal.open_on(device.name)) == bool(told) else "!! "
        print(f"{mark}correct {animal.name:<36} {time.perf_counter() - begun:5.2f} {told[:400] or 'ok'}")


if __name__ == "__main__":
    main()
