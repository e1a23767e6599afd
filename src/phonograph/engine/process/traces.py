"""SequenceTrace: the life of one sequence: how long it waited, which passes served it, and why some ran eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.graphs.phases.decisions import Reason, RunEagerly
from phonograph.graphs.running.runner import Runner


class PassCounts(msgspec.Struct, frozen=True):
    """Passes of one phase."""

    phase: str
    replayed: int
    eager: dict[str, int]
    """By reason."""
    details: dict[str, str] = msgspec.field(default_factory=dict)
    """By reason, what the latest eager pass was like."""

    @property
    def total(self) -> int:
        return self.replayed + sum(self.eager.values())


class SequenceTrace(msgspec.Struct, frozen=True):
    """One sequence from its arrival to its end; times are in seconds since it arrived."""

    request_id: str
    index: int
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    admitted: float | None
    """When it got a row and pages; None if it never did."""
    first_token: float | None
    """When its first token was there; None if none ever was."""
    ended: float
    preemptions: int
    prompt: tuple[PassCounts, ...]
    """The passes that computed its prompt."""
    output: tuple[PassCounts, ...]
    """The passes that ran from there to its end. Each brought it a token, but for those that only draft, and for the
    last few, which were launched ahead of its end."""


Counted = dict[str, tuple[int, dict[Reason, int]]]
"""By phase: replays, and eager calls by reason."""


@dataclass(slots=True)
class _Life:
    """What is known of a sequence that runs."""

    admitted: float
    entries: int = 0
    first_token: float | None = None
    is_prefilled: bool = False
    prompt: dict[str, PassCounts] = field(default_factory=dict)
    counted: Counted = field(default_factory=dict)
    """What the runners had counted when its prompt was computed."""


class Traces:
    """Follows sequences by steps that compute prompts, and by counts at their ends: decode steps cost nothing."""

    def __init__(self, runners: Mapping[str, Runner], clock: Callable[[], float] = time.monotonic) -> None:
        self._runners = runners
        self._clock = clock
        self._lives: dict[Sequence, _Life] = {}

    def launched(self, step: ScheduledStep, begun: float) -> None:
        """A step that computes parts of prompts was launched, from this time of the clock on."""
        runner = self._runners[step.pass_name]
        last, phase = runner.last, runner.phase.name
        one = PassCounts(phase, 1, {})
        if isinstance(last, RunEagerly):
            one = PassCounts(phase, 0, {last.reason.value: 1}, {last.reason.value: last.detail})
        counted: Counted | None = None
        for chunk in step.prefills:
            life = self._lives.get(chunk.sequence)
            if life is None:
                life = self._lives[chunk.sequence] = _Life(begun)
            life.entries += chunk.enters
            before = life.prompt.get(phase)
            life.prompt[phase] = one if before is None else _added(before, one)
            if chunk.samples:
                counted = counted or self._counted()
                life.is_prefilled, life.counted = True, counted

    def first_token(self, sequence: Sequence) -> None:
        """Its first token is there."""
        life = self._lives.get(sequence)
        if life is not None:
            life.first_token = self._clock()

    def ended(self, sequence: Sequence, finish: FinishReason) -> SequenceTrace:
        """What became of it; it is forgotten."""
        life, arrival = self._lives.pop(sequence, None), sequence.request.arrival
        output = self._since(life.counted) if life is not None and life.is_prefilled else ()
        prompt = tuple(life.prompt.values()) if life is not None else ()
        return SequenceTrace(
            request_id=sequence.request.id,
            index=sequence.index,
            finish=finish,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            output_tokens=len(sequence.outputs),
            admitted=None if life is None else life.admitted - arrival,
            first_token=None if life is None or life.first_token is None else life.first_token - arrival,
            ended=self._clock() - arrival,
            preemptions=max(0, life.entries - 1) if life is not None else 0,
            prompt=prompt,
            output=output,
        )

    def _counted(self) -> Counted:
        return {name: (runner.stats.num_replays, dict(runner.stats.eager)) for name, runner in self._runners.items()}

    def _since(self, before: Counted) -> tuple[PassCounts, ...]:
        found = []
        for name, (replays, eager) in self._counted().items():
            old_replays, old_eager = before.get(name, (0, {}))
            new = [reason for reason, calls in eager.items() if calls > old_eager.get(reason, 0)]
            runner = self._runners[name]
            counts = PassCounts(
                runner.phase.name,
                replays - old_replays,
                {reason.value: eager[reason] - old_eager.get(reason, 0) for reason in new},
                {reason.value: runner.stats.details[reason] for reason in new},
            )
            if counts.total:
                found.append(counts)
        return tuple(found)


def _added(one: PassCounts, other: PassCounts) -> PassCounts:
    reasons = {**one.eager, **other.eager}
    eager = {reason: one.eager.get(reason, 0) + other.eager.get(reason, 0) for reason in reasons}
    return PassCounts(one.phase, one.replayed + other.replayed, eager, {**one.details, **other.details})
