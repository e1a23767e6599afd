"""Engine turns: parts of a benchmark that take turns on engines, each of which is opened once."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM

Figures = dict[str, Any]
_TOLD = 600
"""Letters of what was found on one engine."""


@dataclass(frozen=True)
class Engine:
    """One that a part wants: parts that want the same share it, since opening one takes longer than most of them."""

    changes: tuple[tuple[str, Any], ...] = ()
    model: RandomCheckpoint | None = None
    """None for the model that is measured."""
    accepts: float | Literal["right"] | None = "right"
    """Drafts that are right, as in service; or by `synthetic_acceptance`, at a rate, or None for none."""
    instance: int = 0
    """Engines that differ in nothing else are opened anew: what they differ by is noise."""

    @staticmethod
    def of(
        model: RandomCheckpoint | None = None, accepts: float | Literal["right"] | None = "right", **changes: Any
    ) -> Engine:
        return Engine(tuple(sorted(changes.items())), model, accepts)


Wanted = tuple[Engine, Callable[[LLM], Any]]
Part = Generator[Wanted, Any, Figures]
"""Yields what it measures on which engine, is sent what was found, and returns its figures."""


class Turns:
    """Runs parts: an engine is opened when one wants it, and gone when none that waits does."""

    def __init__(self, parts: Mapping[str, Part], open_: Callable[[Engine], LLM], clean: Callable[[], None]) -> None:
        self.figures: Figures = {}
        self._parts, self._open, self._clean = dict(parts), open_, clean
        self._waiting: dict[str, Wanted] = {}

    def run(self, save: Callable[[Figures], None]) -> None:
        """`save` is called after each engine, so that a run that is ended leaves what it found."""
        for name in self._parts:
            self._go_on(name, None)
        while self._waiting:
            engine = next(iter(self._waiting.values()))[0]
            try:
                self._on(engine)
            except Exception as error:  # the other engines are worth having all the same
                for name in [name for name, (wanted, _) in self._waiting.items() if wanted == engine]:
                    self._failed(name, error)
            self._clean()
            save(self.figures)

    def _on(self, engine: Engine) -> None:
        llm = self._open(engine)
        while (name := self._next(engine)) is not None:
            begun = time.perf_counter()
            try:
                found = self._waiting[name][1](llm)
            except Exception as error:  # so are the other parts
                self._failed(name, error)
                continue
            # A run that is ended before a part is done leaves here what it found.
            print(f"  {name}: {time.perf_counter() - begun:.1f} s: {str(found)[:_TOLD]}", flush=True)
            self._go_on(name, found)

    def _next(self, engine: Engine) -> str | None:
        return next((name for name, (wanted, _) in self._waiting.items() if wanted == engine), None)

    def _go_on(self, name: str, found: Any) -> None:
        try:
            self._waiting[name] = self._parts[name].send(found)
        except StopIteration as done:
            self._waiting.pop(name, None)
            self.figures[name] = done.value
            print(f"{name}: {done.value}", flush=True)

    def _failed(self, name: str, error: Exception) -> None:
        self._waiting.pop(name)
        self.figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}: {self.figures[name]}", flush=True)
