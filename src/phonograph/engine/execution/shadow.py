"""Shadow: a share of the steps in service runs a second time, eagerly, and is committed only if bitwise equal."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from phonograph.engine.execution.reproducer_files import EngineState, Reproducers, told
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.base import Pass
from phonograph.engine.state.column import Writer
from phonograph.errors import PlanError, VerifyError
from phonograph.graphs.phases.decisions import Replay
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.shadow import StatePart, UncheckedError, shadowed

log = logging.getLogger("phonograph")


class MistrustedStepError(VerifyError):
    """A replay differed from the eager path; the tables are as before its pass, and its recording is released."""


@dataclass(frozen=True)
class Shadowing:
    """How much is checked, and where reproducers go."""

    share: float
    """Of the steps that a recording serves."""
    folder: Path | None = None
    """The folder for batches that were computed wrongly; None: they are not saved."""
    with_tokens: bool = False
    """Whether token ids may be written, to files and to the log."""
    seed: int = 0


def shadowing_for(options: EngineOptions) -> Shadowing | None:
    """From the options, None if off; refuses a folder that can't be written to at start-up, not at the first fault."""
    if not options.shadow_verify:
        return None
    if options.shadow_dir is not None:
        _try_folder(options.shadow_dir)
    return Shadowing(options.shadow_verify, options.shadow_dir, options.shadow_tokens)


def expect_exact(runners: Mapping[str, Runner]) -> None:
    """Refuse backends whose recordings round differently from the body: all of them would count as wrong."""
    rounding = [name for name, runner in runners.items() if not runner.backend.is_exact]
    if rounding:
        raise PlanError(
            f"shadow_verify compares bits, and what is compiled for {', '.join(rounding)} rounds differently from the "
            "eager path. Use --tc-compiler eager, another backend, or no --shadow-verify."
        )


def _try_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"trial")
    except OSError as error:
        raise PlanError(
            f"shadow_dir: writing to {folder} failed ({error.strerror}). Give --shadow-dir one that can be written to."
        ) from None


_BEFORE = {"fast": "a few recordings of each phase", "all": "all recordings", "off": "no recording (--verify off)"}


def described_checks(options: EngineOptions, *, is_recorded: bool) -> str:
    """How replays are compared with the eager path, before the first request and in service, in words."""
    if not is_recorded:
        return f"checks: nothing is recorded{', and --shadow-verify checks no step' if options.shadow_verify else ''}"
    in_service = "no step (no --shadow-verify)"
    if options.shadow_verify:
        kept = f"reproducers go to {options.shadow_dir}" if options.shadow_dir else "no reproducers (no --shadow-dir)"
        in_service = f"{options.shadow_verify:g} of the steps that are replays, {kept}"
    return f"checks: before the first request {_BEFORE[options.verify]}; in service {in_service}"


class Shadow:
    """Checks steps before they are committed, so that no wrong token is sent.

    What a step may write is saved first: the rows of the request tables that its batch has, what is one number wide for
    all rows, and the pages that its tokens go to. So the eager run starts from the same state, and what a wrong replay
    left is undone.
    """

    def __init__(self, asked: Shadowing, engine: EngineState) -> None:
        self.num_checked = self.num_wrong = 0
        self._was_unchecked = False
        self._asked = asked
        self._engine = engine
        self._numbers = random.Random(asked.seed)
        self._files = Reproducers(asked.folder, with_tokens=asked.with_tokens) if asked.folder is not None else None

    def is_due(self) -> bool:
        """Whether the next step is checked."""
        return self._numbers.random() < self._asked.share

    def run(self, runner: Runner, batch: Any, chosen: Pass, *, repeats: bool) -> Any:
        """Serve a batch of a pass that says what it writes; raises where the replay is wrong.

        `repeats` says that without a check the step would be a repeat: then that is what is checked.
        """
        assert chosen.written is not None
        rows, positions = chosen.written(batch)
        state = self.state(rows, positions)
        try:
            outputs, mismatch = shadowed(runner, batch, state, repeats=repeats)
        except UncheckedError as error:
            if not self._was_unchecked:
                log.warning("%s It is served as it is, and so are others like it.", error)
            self._was_unchecked = True
            return error.result
        self.num_checked += isinstance(runner.last, Replay)
        if mismatch is None:
            return outputs
        self.num_wrong += 1
        kept = ""
        if self._files is not None:
            kept = self._files.write(mismatch, batch, chosen.public, self._engine, torch.unique(rows))
        why = told(mismatch, with_tokens=self._asked.with_tokens)
        runner.mistrust(mismatch.key, f"{why}.{kept}".rstrip("."))
        since = "fail (--graphs strict)" if runner.options.strict else "run eagerly"
        raise MistrustedStepError(f"{mismatch.key}: {why}. The recording is released, and such batches {since}.{kept}")

    def state(self, rows: torch.Tensor, positions: torch.Tensor) -> list[StatePart]:
        """What a batch with these tokens may write."""
        tables, caches = self._engine.tables, self._engine.caches
        page_size, width = caches[0].page_size, tables.pages.shape[1]
        pages = tables.pages[rows, (positions // page_size).clamp(0, width - 1)].long()
        pages, own = torch.unique(pages[pages > 0]), torch.unique(rows)
        everybody = torch.arange(1, tables.pages.shape[0], device=own.device)
        parts = [
            # What is one number wide is looked at in all rows: nobody may write another sequence's.
            StatePart(column.name, tables[column.name], 0, everybody if column.width == 1 else own)
            for column in tables.columns
            if Writer.GRAPH in column.writer and tables.is_made(column.group)
        ]
        for number, group in enumerate(caches):
            of_group = f" of group {number}" if number else ""
            for cache in group.caches:
                parts.append(StatePart(f"keys{of_group}", cache.keys, 1, pages))
                parts.append(StatePart(f"values{of_group}", cache.values, 1, pages))
        return parts
