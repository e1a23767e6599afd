"""PHASES: the engine's phases as a plan and its flags know them; needs no torch, so that `--help` is quick."""

from __future__ import annotations

from phonograph.graphs.config import KNOWN_PHASES

PHASES = tuple(KNOWN_PHASES[name] for name in ("decode", "prefill", "idle"))
