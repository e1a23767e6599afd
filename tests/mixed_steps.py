"""Plain steps with prompts among them, in scripts: what is drafted after them is what a function makes of the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from drafted import PROMPTS
from phonograph import SamplingParams
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.ops.layers.rounds import continued
from phonograph.engine.passes.decode import DecodeBatch
from phonograph.engine.passes.registry import DRAFT_EXTEND
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence as Seq
from phonograph.engine.scheduling.step_width import Planned
from speculation import Tokens, check

DEPTH, PLACES = 3, 4
ASKED = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
ENGINE: dict[str, Any] = {"max_ahead": 0, "prefix_cache": False, "chunk": 7, "unread_places": PLACES}
Drafts = Callable[[Sequence[int], int], list[int]]
Moment = tuple[int, Sequence[Tokens]]
"""The width of a step, and the prompts that come before it."""

PLAIN, ROUND = (1, ()), (DEPTH + 1, ())
SHORT, ONE, LONG, TWO_CHUNKS = PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3]
BEGUN: Moment = (DEPTH + 1, [SHORT])


def mixed(*prompts: Tokens) -> Moment:
    """A plain step, with prompts among it where rows decode."""
    return 1, prompts


SCRIPTS: dict[str, list[Moment]] = {
    "one": [BEGUN, mixed(ONE), ROUND, ROUND],
    "several": [BEGUN, mixed(ONE), mixed(TWO_CHUNKS), PLAIN, ROUND, ROUND],
    "chunks": [BEGUN, mixed(LONG), *[PLAIN] * 7, ROUND, PLAIN, ROUND, ROUND],
    "a round amid chunks": [BEGUN, mixed(LONG), PLAIN, ROUND, PLAIN, PLAIN, PLAIN, PLAIN, ROUND, ROUND],
    "plain steps after the end": [BEGUN, PLAIN, mixed(ONE), PLAIN, PLAIN, ROUND, ROUND],
    "full before it": [BEGUN, *[PLAIN] * PLACES, mixed(ONE), ROUND, ROUND],
    "full by it": [BEGUN, *[PLAIN] * (PLACES - 1), mixed(ONE), PLAIN, ROUND, ROUND],
    "more than full": [BEGUN, *[mixed(ONE), PLAIN, PLAIN] * 3, ROUND, ROUND],
    "a mixed round after it": [BEGUN, mixed(ONE), PLAIN, (DEPTH + 1, [TWO_CHUNKS]), ROUND, mixed(ONE), ROUND],
    "without decodes": [mixed(SHORT, ONE), ROUND, ROUND],
    "plain from the start": [mixed(SHORT), mixed(TWO_CHUNKS), PLAIN, PLAIN, mixed(ONE), ROUND, PLAIN, ROUND],
}


def drawn(seed: int, count: int = 60) -> list[Moment]:
    """By chance: mostly plain steps, and a prompt in every fourth step."""
    numbers = random.Random(seed)
    widths = [numbers.choice((1, 1, 1, 1, DEPTH + 1)) for _ in range(count)]
    return [(width, numbers.choices(PROMPTS) if numbers.random() < 0.25 else ()) for width in widths]


among_prompts = pytest.mark.parametrize(
    ("moments", "backend"),
    [
        *(pytest.param(moments, "disabled", id=name) for name, moments in SCRIPTS.items()),
        *(pytest.param(drawn(seed), "disabled", id=f"drawn-{seed}") for seed in range(4)),
        *(pytest.param(drawn(9, 30), backend, id=backend) for backend in ("full", "breakable")),
    ],
)
"""Every script eagerly; one by chance for each backend that records."""


def looked_up(known: Sequence[int], depth: int) -> list[int]:
    """What came after the same tokens before, or nothing but -1."""
    found: list[int] = continued(torch.tensor([[*known]]), torch.tensor([len(known) - 1]), depth)[0].tolist()
    return found


@dataclass
class Scripted:
    """The protocol `StepWidth`: steps of the width that is set."""

    width: int = 1

    def of(self, decodes: Any, chunks: Any = ()) -> Planned:
        return Planned(self.width)

    def took(self, step: Any, updates: Any, probed: Any) -> None:
        pass


@dataclass
class Played:
    """An engine that went through a script, and what it did."""

    core: EngineCore[Executor]
    drafts: Drafts | None = None
    """What is to be drafted; None: it is not compared."""
    steps: list[Step] = field(default_factory=list)
    replays: list[dict[str, int]] = field(default_factory=list)
    """Of each step, by pass, those that there were."""
    is_each_looked_at: bool = True
    """Whether drafts are compared after each round too."""
    num_seen: int = 0
    """Rows whose drafts were compared before a round."""
    _wrong: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """What was drafted, and what should have been; an engine catches what a pass beside another raises."""
    _sequences: list[Seq] = field(default_factory=list)

    def play(self, moments: Sequence[Moment]) -> Played:
        """All steps of the script, then rounds to the end; what is said is what plain decoding says."""
        policy, launch = Scripted(), self.core.executor.launch
        self.core.scheduler.width = policy

        def noting(step: Step) -> Any:
            self.steps.append(step)
            return launch(step)

        self.core.executor.launch = noting  # type: ignore[method-assign]
        self._look_before_rounds()
        for width, prompts in moments:
            policy.width = width
            for prompt in prompts:
                self._sequences += self.core.add(Request(f"{len(self._sequences)}", prompt, ASKED))
            self._step()
        policy.width = DEPTH + 1
        while not self.core.is_idle:
            self._step()
        check(self._sequences)
        assert not self._wrong
        return self

    def _look_before_rounds(self) -> None:
        runner = self.core.executor.runners[DRAFT_EXTEND.name]
        run = runner.run

        def looked_at(batch: DecodeBatch) -> object:
            found, rows = run(batch), {*batch.rows.tolist()}
            if batch.tokens_per_row > 1:
                for sequence in self._sequences:
                    if sequence.row in rows and sequence.finish is None:
                        self._look_at(sequence)
                        self.num_seen += 1
            return found

        runner.run = looked_at  # type: ignore[method-assign, assignment]

    def _step(self) -> None:
        runners, count = self.core.executor.runners, len(self.steps)
        before = {name: one.stats.replays.total() for name, one in runners.items()}
        updates = self.core.step()
        if len(self.steps) == count:
            return
        self.replays.append({name: one.stats.replays.total() - before[name] for name, one in runners.items()})
        is_looked_at = self.is_each_looked_at and self.steps[-1].tokens_per_row > 1
        for sequence, tokens, finish in updates:
            if is_looked_at and tokens and finish is None:
                self._look_at(sequence)

    def _look_at(self, sequence: Seq) -> None:
        """But not at what is drafted past a row's end: it has no page, and nobody takes it."""
        if self.drafts is None:
            return
        found = self.core.executor.tables["draft"].view(-1, DEPTH)[sequence.row].tolist()
        left = ASKED.max_tokens - len(sequence.outputs)
        wanted = self.drafts(sequence.known(), DEPTH)
        if found[:left] != wanted[:left]:
            self._wrong.append((found, wanted))
