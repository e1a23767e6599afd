"""SGLang flags: aliases of ours, so that launch lines carry over; each says what to write instead."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phonograph.graphs.planning.settings import Level

PIECEWISE_RULES = ("tc-architecture", "tc-debug", "tc-deterministic", "tc-packed-weights", "tc-untraceable")
"""Rules that SGLang's flag overrides: those that keep a phase from tc_piecewise where it could be tried."""

JSON_KEYS = {"max_bs": "{phase}.limit", "bs": "{phase}.buckets", "tc_compiler": "tc_compiler"}
"""Keys that SGLang's JSON has for a phase, and our settings."""
_KEYS_NOTE = "for max_bs write limit, for bs buckets, and tc_compiler beside the phases"


@dataclass(frozen=True)
class Alias:
    """An accepted flag of SGLang's, and what to write instead."""

    flag: str
    stands_for: str = ""
    """The flag to write in its place; empty where nothing takes it."""
    level: Level = Level.SWITCH
    value: str | bool | None = None
    """What a switch asks for; None where the alias takes its value from the command line."""
    words: tuple[str, ...] = ()
    """The values that it accepts, where no setting checks them."""
    many: bool = False
    """Whether it takes several values in a row, which our flag takes with commas."""
    note: str = ""
    ignores: tuple[str, ...] = ()
    """The rules that it overrides."""

    @property
    def instead(self) -> str:
        """What to write in its place, value included."""
        if self.value is True:
            return self.stands_for
        past = "".join(f" --ignore-rule {name}" for name in self.ignores)
        return f"{self.stands_for} {self.value or 'VALUE'}{past}"

    @property
    def warning(self) -> str:
        """The warning for the user."""
        return self.warning_of(self.instead)

    def warning_of(self, instead: str) -> str:
        """The warning where this is what to write."""
        if self.stands_for:
            return f"{self.flag} is deprecated; use {instead}{f' ({self.note})' if self.note else ''}"
        return f"{self.flag} is accepted and changes nothing: {self.note}"


ALIASES: tuple[Alias, ...] = (
    Alias("--cuda-graph-config", "--graph-backend", Level.JSON, note=_KEYS_NOTE),
    Alias("--cuda-graph-backend-decode", "--decode-graph-backend", Level.FLAG),
    Alias("--cuda-graph-backend-prefill", "--prefill-graph-backend", Level.FLAG),
    Alias("--cuda-graph-max-bs-decode", "--decode-graph-limit", Level.FLAG),
    Alias("--cuda-graph-max-bs-prefill", "--prefill-graph-limit", Level.FLAG),
    Alias("--cuda-graph-bs-decode", "--decode-graph-buckets", Level.FLAG, many=True),
    Alias("--cuda-graph-bs-prefill", "--prefill-graph-buckets", Level.FLAG, many=True),
    Alias("--cuda-graph-tc-compiler", "--tc-compiler", Level.FLAG),
    Alias("--disable-decode-cuda-graph", "--decode-graph-backend", value="disabled"),
    Alias("--disable-prefill-cuda-graph", "--prefill-graph-backend", value="disabled"),
    Alias("--cuda-graph-mode", "--graph-backend", Level.JSON, note=_KEYS_NOTE),
    Alias("--decode-cuda-graph-backend", "--decode-graph-backend", Level.FLAG),
    Alias("--prefill-cuda-graph-backend", "--prefill-graph-backend", Level.FLAG),
    Alias("--decode-disable-cuda-graph", "--decode-graph-backend", value="disabled"),
    Alias("--prefill-disable-cuda-graph", "--prefill-graph-backend", value="disabled"),
    Alias("--disable-cuda-graph", "--graphs", value="off"),
    Alias("--disable-piecewise-cuda-graph", "--prefill-graph-backend", value="disabled"),
    Alias("--enable-breakable-cuda-graph", "--prefill-graph-backend", value="breakable"),
    Alias("--enforce-piecewise-cuda-graph", "--prefill-graph-backend", value="tc_piecewise", ignores=PIECEWISE_RULES),
    Alias("--piecewise-cuda-graph-compiler", "--tc-compiler", Level.FLAG),
    Alias("--piecewise-cuda-graph-max-tokens", "--prefill-graph-limit", Level.FLAG),
    Alias("--piecewise-cuda-graph-tokens", "--prefill-graph-buckets", Level.FLAG, many=True),
    Alias("--enable-cudagraph-gc", "--graph-gc", value=True),
    Alias("--debug-cuda-graph", "--graph-debug", value=True),
    Alias("--enable-profile-cuda-graph", "--graph-profile", value="phonograph-profile"),
    Alias("--cuda-graph-max-bs", "--decode-graph-limit", Level.FLAG),
    Alias("--cuda-graph-bs", "--decode-graph-buckets", Level.FLAG, many=True),
    Alias("--disable-cuda-graph-padding", "--decode-graph-exact", value=True),
)

_FOREIGN_VARIABLE = re.compile("SGLANG_.*GRAPH")
_INSTEAD_OF_VARIABLES = {"SGLANG_USE_BREAKABLE_CUDA_GRAPH": "--graph-backend breakable"}


def variable_warning(name: str) -> str | None:
    """The warning for an environment variable that configures SGLang's graphs; None for any other."""
    if not _FOREIGN_VARIABLE.match(name):
        return None
    instead = _INSTEAD_OF_VARIABLES.get(name, "--graph-backend or another flag of its group, if one does what it did")
    return f"the environment variable {name} is not read, and changes nothing; use {instead}"
