"""Checks: what must hold for one recording on one batch. An exception in one of them is its failure alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from phonograph.devices.trace import raising_frame
from phonograph.errors import CaptureError, Frame, PhonographError
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.trust.comparison import Allowed, described, differing, mismatch, same_bits
from phonograph.graphs.trust.faults import Faults, Looks
from phonograph.graphs.trust.further_runs import in_a_row, line_of_write, with_none
from phonograph.graphs.trust.padding_writes import PaddingWrites
from phonograph.graphs.trust.rounding import Rounding
from phonograph.graphs.trust.trial import Result, Trial, Way
from phonograph.graphs.trust.verify_report import Check

AllowedOf = Callable[[Any, torch.Tensor], Iterator[torch.Tensor | None]]
"""The same as `Allowed`, of any result: takes its name as well."""
_PADDED, _UNPADDED = Way(), Way(padded=False)
_PADDED_IN_MODE, _MADE = Way(in_function_mode=True), Way(made=True)
_DRAWS = "Draw for the largest bucket and take the used rows, or pass the numbers in a slot"


class Checks:
    """The checks of one trial."""

    def __init__(
        self, trial: Trial, tolerance: float | None, looks: Looks, *, poisons: bool = True, is_thorough: bool = True
    ) -> None:
        """With `is_thorough`, rounding is tried many times before a difference is a failure."""
        self._trial = trial
        self._faults = Faults(trial, looks, tolerance=tolerance, is_thorough=is_thorough)
        self._is_thorough = is_thorough
        self._replay = Way(replay=True, poisons=poisons)
        self._tolerance = tolerance
        self._roundings: dict[Way, Rounding] = {}
        self._has_raised = False
        """Whether the last check raised."""
        self._is_quick = False
        """Whether rows are judged by their largest number before rounding is tried, which takes many runs."""

    def all(self) -> list[Check]:
        """All checks."""
        found = [self._check("inputs", self._inputs)]
        found.append(self._check("poison", self._poison, self._faults.of_poison))
        found.append(self._check("same view", self._same_view, self._faults.of_poison))
        return [*found, *self._against_unpadded()]

    def quick_same_view(self) -> list[Check]:
        """The replay against an eager run on the same padded view: the same kernels, so that rounding plays no part.

        Where a compiler rounds in its own way, that is a run of the code that was recorded, which was compared with the
        body before.
        """
        self._is_quick = True
        return [self._check("same view", self._same_view, self._faults.of_poison)]

    def quick_unpadded(self) -> list[Check]:
        """The replay against a run without padding: two runs where the phase says what it preserves.

        Rounding is tried only where a difference is too much for its row.
        """
        self._is_quick = True
        return self._against_unpadded()

    def _against_unpadded(self) -> list[Check]:
        unpadded = self.unpadded()
        if self._has_raised:
            return [unpadded]  # the others need the same two runs
        return [unpadded, self._check("draws", self._draws, self._faults.of_draws), self._check("state", self._state)]

    def unpadded(self) -> Check:
        """The replay against a run without padding, in outputs alone."""
        return self._check("unpadded", self._unpadded, self._faults.of_padding)

    def absent(self, slot: Slot) -> Check:
        """Whether the value that stands for an absent input is neutral."""
        return self._check(f"absent {slot.name}", lambda: self._absent(slot), lambda: self._faults.of_none(slot))

    def gaps(self) -> Check:
        """Whether gaps give the same after another batch."""
        return self._check("gaps", self._gaps, self._faults.of_gaps)

    def stand_in(self) -> Check:
        """Whether the recording gives batches of a weaker product the bits that they get without it."""
        return self._check(f"stands in for {self._trial.served}", self._stands_in, self._faults.of_stand_in)

    def _check(self, name: str, problem: Callable[[], str], fault: Callable[[], str] | None = None) -> Check:
        """A check; where it fails, `fault` says where that begins."""
        trial = self._trial
        self._has_raised = False
        try:
            detail = problem()
            if detail and fault is not None:
                detail = _with_sentence(detail, fault())
        except Exception as error:
            self._has_raised = True
            detail = told(error, self._faults.raising)
        return Check(trial.key, trial.used, name, not detail, detail)

    # -- the checks ---------------------------------------------------------------------------------------

    def _inputs(self) -> str:
        """The body leaves its inputs as they are, and reads none that graphs leave out."""
        self._trial.discover()
        return "; ".join(filter(None, (self._trial.input_write, self._trial.left_out_read)))

    def _poison(self) -> str:
        """Two different poisons give equal bits."""
        self._trial.discover()
        first, second = (self._trial.result(Way(replay=True, pattern=pattern)) for pattern in (0, 1))
        return _all_of(_outputs(second), _outputs(first))

    def _against_padded(self, compare: Callable[[Way], str]) -> str:
        """A comparison with an eager run on the padded view, by the kernels of the capture.

        Where captures run in a mode, torch's own layers leave fused kernels out there (`nn.TransformerEncoderLayer`):
        what differs is compared once more with a run in a mode, which takes longer.
        """
        problem = compare(_PADDED)
        if problem and self._trial.runner.device.capabilities.captures_in_function_mode:
            return problem if compare(_PADDED_IN_MODE) else ""
        return problem

    def _same_view(self) -> str:
        """The replay equals the eager run on the same padded view, in outputs and state; fused ops may round."""
        self._trial.discover()
        return self._against_padded(self._same_as)

    def _same_as(self, way: Way) -> str:
        replayed = self._trial.result(self._replay)
        if self._is_quick and self._is_as_made(replayed):
            return ""
        eager = self._trial.result(way)
        if self._is_quick:
            found, wanted = ({**_outputs(result), **_state(result)} for result in (replayed, eager))
            return _all_of(found, wanted, self._tolerance, self._allowed(_PADDED))
        if not self._trial.runner.backend.is_exact:
            return _all_of(_outputs(replayed), _outputs(eager), self._tolerance, self._allowed(_UNPADDED))
        tolerance = self._tolerance or 0.0
        allowed = self._allowed(_UNPADDED) if tolerance else None
        problem = _all_of(_outputs(replayed), _outputs(eager), tolerance, allowed)
        return problem or ("" if tolerance else _all_of(_state(replayed), _state(eager)))

    def _is_as_made(self, replayed: Result) -> bool:
        """Whether a replay gives the bits of a run of what was recorded in the place of the body."""
        recording = self._trial.runner.recording(self._trial.key)
        if self._trial.runner.backend.is_exact or recording.made is None:
            return False
        try:
            made = self._trial.result(_MADE)
        except CaptureError:  # it was traced for other values of something that is no slot
            return False
        return not _all_of({**_outputs(replayed), **_state(replayed)}, {**_outputs(made), **_state(made)})

    def _unpadded(self) -> str:
        """The replay is close to the eager run without padding."""
        self._trial.discover()
        replayed, eager = self._trial.result(self._replay), self._trial.result(_UNPADDED)
        problem = _all_of(_outputs(replayed), _outputs(eager), self._tolerance, self._allowed(_UNPADDED))
        if problem and not torch.equal(eager.next_draw, self._trial.untouched_draw):
            problem += f"; the body draws random numbers, which may differ with padding. {_DRAWS}"
        return problem

    def _draws(self) -> str:
        """After the replay and after the run without padding, the same random numbers come next."""
        replayed, eager = self._trial.result(self._replay), self._trial.result(_UNPADDED)
        if torch.equal(replayed.next_draw, eager.next_draw):
            return ""
        if not self._trial.extent.is_padded:
            return "a replay draws other random numbers than the eager run: they were frozen at capture"
        return (
            "the body draws random numbers, and with padding more of them: from the next call on, used rows get "
            f"others than without. {_DRAWS}"
        )

    def _state(self) -> str:
        """State after the replay is near what the run without padding leaves, wherever a live row may read."""
        self._trial.discover()
        noisy = self._trial.makes_noise
        way = Way(padded=False, noisy=noisy)
        replayed, eager = self._trial.result(replace(self._replay, noisy=noisy)), self._trial.result(way)
        allowed = self._allowed(way)
        problem = _all_of(_outputs(replayed), _outputs(eager), self._tolerance, allowed) if noisy else ""
        writes = PaddingWrites(self._trial, replayed, eager)

        def less_rounded(name: str, alone: torch.Tensor) -> torch.Tensor:
            return _less_rounded(alone, eager.state[name], partial(allowed, ("state", name)))

        wrong: list[str] = [problem] if problem else []
        for name, wanted in eager.state.items():
            found, start = replayed.state[name], eager.start[name]
            wrong += self._differing_state(name, replayed, eager, allowed)
            alone = ~same_bits(found, start) & same_bits(wanted, start)
            if self._is_quick:
                alone = differing(found, wanted, tolerance=self._tolerance, among=alone)
            writes.note(name, alone)
        begins = self._faults.of_state(noisy=noisy) if wrong else ""
        if noisy and not wrong:
            wrong = self._from_its_start()
            begins = self._faults.of_state(noisy=False) if wrong else ""
        writing = writes.problems(less_rounded, self._faults.of_write)
        return _with_sentence("; ".join([*wrong, *writing]), begins)

    def _from_its_start(self) -> list[str]:
        """The same for state as it is, which noise may hide: a maximum that padding alone raises."""
        replayed, eager = self._trial.result(self._replay), self._trial.result(_UNPADDED)
        allowed = self._allowed(_UNPADDED)
        return [text for name in eager.state for text in self._differing_state(name, replayed, eager, allowed)]

    def _differing_state(self, name: str, replayed: Result, eager: Result, allowed: AllowedOf) -> list[str]:
        """How a state differs where the run without padding has written it: in a sentence, or in none."""
        found, wanted, start = replayed.state[name], eager.state[name], eager.start[name]
        room = partial(allowed, ("state", name))
        wrong = differing(found, wanted, tolerance=self._tolerance, allowed=room, among=~same_bits(wanted, start))
        if not bool(wrong.any()):
            return []
        frame = line_of_write(self._trial, name)
        where = f" ({frame})" if frame is not None else ""
        return [f"the state {name} {described(found, wanted, wrong)} after the replay{where}"]

    def _gaps(self) -> str:
        """After another batch, gaps give what they give eagerly after it; replays pass them the same tensors again."""
        self._trial.discover()
        replayed = in_a_row(self._trial, self._replay)
        is_exact = self._trial.runner.backend.is_exact
        room = (self._tolerance or 0.0, None) if is_exact else (self._tolerance, self._allowed(_UNPADDED))

        def compare(way: Way) -> str:
            eager = in_a_row(self._trial, way)
            return _all_of(_named_outputs(replayed), _named_outputs(eager), *room)

        problem = self._against_padded(compare)
        return (
            f"after another batch {problem}. Does a gap remember what it was passed by `is` or id()?" if problem else ""
        )

    def _absent(self, slot: Slot) -> str:
        """The value that stands for an absent input gives what None gives."""
        self._trial.discover()
        wanted = with_none(self._trial, slot)
        if wanted is None:
            return ""
        eager = self._trial.result(_UNPADDED)
        problem = _all_of(_outputs(eager), _named_outputs(wanted), self._tolerance, self._allowed(_UNPADDED))
        return f"{problem} with absent={slot.absent} in the place of None" if problem else ""

    def _stands_in(self) -> str:
        trial = self._trial
        trial.discover()
        is_recorded = trial.served in trial.runner.captured
        tolerance = 0.0 if is_recorded else self._tolerance or 0.0
        found = trial.result(self._replay)

        def compare(way: Way) -> str:
            wanted = trial.result(way)
            further = [str(path) for path in found.outputs if path not in wanted.outputs]
            if further:
                return f"puts out {further[0]} as well, which no caller expects"
            allowed = self._allowed(_UNPADDED) if tolerance else None
            problem = _all_of(_outputs(found), _outputs(wanted), tolerance, allowed)
            return problem or ("" if tolerance else _all_of(_state(found), _state(wanted)))

        return compare(Way(replay=True, key=trial.served)) if is_recorded else self._against_padded(compare)

    def _allowed(self, way: Way) -> AllowedOf:
        """What rounding may move the results of a run by."""
        if way not in self._roundings:
            trial = self._trial

            def run(around: Any) -> Mapping[Any, Any]:
                result = trial.watched(way, around)
                return {**_outputs(result), **_state(result)}

            self._roundings[way] = Rounding(run, is_thorough=self._is_thorough)
        measured = self._roundings[way].allowed
        return (lambda name, wanted: chain((None,), measured(name, wanted))) if self._is_quick else measured


def _less_rounded(alone: torch.Tensor, wanted: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """What the replay alone has written, of what it seems to have. A number that a run writes may be the one that was
    there: then it is another in a run that rounds in another way."""
    for moved in allowed(wanted) if bool(alone.any()) else ():
        if moved is not None:
            alone = alone & (moved == 0)
        if not bool(alone.any()):
            break
    return alone


def _outputs(result: Result) -> dict[tuple[str, Any], Any]:
    return _named_outputs(result.outputs)


def _named_outputs(outputs: Mapping[Any, Any]) -> dict[tuple[str, Any], Any]:
    return {("output", path): value for path, value in outputs.items()}


def _state(result: Result) -> dict[tuple[str, Any], Any]:
    return {("state", name): value for name, value in result.state.items()}


def _all_of(
    found: Mapping[tuple[str, Any], Any],
    wanted: Mapping[tuple[str, Any], Any],
    tolerance: float | None = 0.0,
    allowed: AllowedOf | None = None,
) -> str:
    """What is wrong with each of several results."""
    problems = []
    for name, value in wanted.items():
        room: Allowed | None = (lambda w, n=name: allowed(n, w)) if allowed is not None else None
        problem = mismatch(found.get(name), value, tolerance=tolerance, allowed=room)
        if problem:
            problems.append(f"{name[0]} {name[1] or '(the only one)'} {problem}")
    return "; ".join(problems)


def _with_sentence(detail: str, sentence: str) -> str:
    return f"{detail}{'' if detail.endswith('?') else '.'} {sentence}" if sentence else detail


def told(error: Exception, line: Callable[[], Frame | None] = lambda: None) -> str:
    """What a check raised, where, and what may be done about it; `line` looks for one where the error has none."""
    frame = raising_frame(error.__traceback__)
    if frame is None and not isinstance(error, PhonographError):
        frame = line()
    what = (str(error).strip().splitlines() or ["no message"])[0]
    text = what if isinstance(error, PhonographError) else f"raises {type(error).__name__}: {what.rstrip('.')}"
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, PhonographError):
        return text
    at = f" ({frame})" if frame is not None else ""
    return f"{text}{at}. If no batch is so small, say so with smallest="
