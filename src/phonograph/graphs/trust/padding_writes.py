"""PaddingWrites: state that only padding writes, and whether a live row may read it.

It may not where pad values name a declared null row, and where whoever reads that place writes it first, as in a
scratch buffer that every run fills anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phonograph.graphs.inputs.fields import fetch
from phonograph.graphs.phases.phase import Sample
from phonograph.graphs.trust.comparison import same_bits
from phonograph.graphs.trust.trial import Result, State, Trial

_REMEDY = (
    "If pad values name a row or page that nobody uses, declare that: Pad.fill(value, null=True). Else mask the write"
)

_NUM_FULL = 8
"""Batches that a scratch buffer is tried with: one alone may happen to write the very page that padding has written."""


class PaddingWrites:
    """The places of one trial's state that a padded run writes and one without padding leaves alone."""

    def __init__(self, trial: Trial, replayed: Result, eager: Result) -> None:
        self._trial = trial
        self._replayed = replayed
        self._eager = eager
        self._places: dict[str, torch.Tensor] = {}

    def note(self, name: str, places: torch.Tensor) -> None:
        """The replay alone writes these elements of a tensor."""
        if bool(places.any()):
            self._places[name] = places

    def problems(
        self,
        less_rounded: Callable[[str, torch.Tensor], torch.Tensor],
        line_of: Callable[[str, torch.Tensor], str],
    ) -> list[str]:
        """What padding writes where a live row may read; `less_rounded` takes many runs, and is asked last.

        `line_of` tells, in a sentence, which op writes these places of a state, if that can be told.
        """
        left = self._places
        if left and self._null_slots:
            left = self._less_null(left)
        left = _some({name: self._less_moved(name, places) for name, places in left.items()})
        if left:
            left = self._less_scratch(left)
        left = _some({name: less_rounded(name, places) for name, places in left.items()})
        return [self._told(name, places, line_of(name, places)) for name, places in left.items()]

    def _less_moved(self, name: str, places: torch.Tensor) -> torch.Tensor:
        """None, if the replay leaves as many elements alone that it should have written: the writes went elsewhere,
        as when rounding picks another token. Whether it may is judged where they should have gone."""
        start = self._eager.start[name]
        left_alone = same_bits(self._replayed.state[name], start) & ~same_bits(self._eager.state[name], start)
        return places & (places.sum() > left_alone.sum())

    @property
    def _null_slots(self) -> list[str]:
        slots = self._trial.runner.phase.slots
        return [slot.name for slot in slots if slot.pad is not None and slot.pad.null]

    def _told(self, name: str, places: torch.Tensor, line: str) -> str:
        declared = f" besides the null row that {self._null_slots[0]!r} declares" if self._null_slots else ""
        return (
            f"padding writes {int(places.sum().item()):,} of {places.numel():,} elements of the state {name}"
            f"{declared}, which a run without padding leaves alone and a live row may read. "
            f"{f'{line}. ' if line else ''}{_REMEDY}"
        )

    def _less_null(self, left: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without the places that a batch of nothing but padding writes, and the live batch does not."""
        null = self._trial.result_of(self._trial.null_sample())
        masks = {}
        for name, places in left.items():
            is_null = ~same_bits(null.state[name], null.start[name])
            if not self._uses_null():
                is_null &= same_bits(self._eager.state[name], self._eager.start[name])
            masks[name] = self._less_null_moved(name, places & ~is_null, is_null)
        return _some(masks)

    def _less_null_moved(self, name: str, places: torch.Tensor, is_null: torch.Tensor) -> torch.Tensor:
        """Without the places that a batch of padding writes once it fills the bucket, for as many that it then leaves
        alone: it is rounded otherwise, and so may be the token that it picks."""
        left_alone = is_null & same_bits(self._replayed.state[name], self._eager.start[name])
        if not bool(places.any()) or not bool(left_alone.any()):
            return places
        full = self._trial.result_of(self._trial.null_sample(full=True))
        moved = places & ~same_bits(full.state[name], full.start[name])
        return places & ~moved if int(moved.sum()) <= int(left_alone.sum()) else places

    def _uses_null(self) -> bool:
        """Whether the sample itself has rows that are null, as a bucket of more rows than there are requests may."""
        sample, slots = self._trial.sample, self._trial.runner.phase.slots
        for slot in slots:
            if slot.pad is not None and slot.pad.null:
                given = fetch(sample.batch, sample.kwargs, slot.path)
                if given is not None and slot.pad.value in torch.as_tensor(given):
                    return True
        return False

    def _less_scratch(self, left: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without the places that every batch which fills the bucket writes, whatever they held."""
        stays = {name: torch.zeros_like(places) for name, places in left.items()}
        for turn in range(_NUM_FULL):
            for name, places in self._unwritten(left, self._trial.full_sample(turn)).items():
                stays[name] |= places
            if all(torch.equal(stays[name], places) for name, places in left.items()):
                break
        return _some(stays)

    def _unwritten(self, left: dict[str, torch.Tensor], full: Sample) -> dict[str, torch.Tensor]:
        """Without the places that one batch writes.

        It is run twice: as if there had been no padding before it, and with what padding left in these places.
        """
        trial = self._trial
        starts: State = {
            name: torch.where(places, self._replayed.state[name], self._eager.start[name])
            for name, places in left.items()
        }
        clean, after = trial.result_of(full), trial.result_of(full, instead=starts)
        for path, wanted in clean.outputs.items():
            found = after.outputs[path]
            if isinstance(wanted, torch.Tensor) and not bool(same_bits(found, wanted).all()):
                return left
        changed = {name: ~same_bits(after.state[name], clean.state[name]) for name in clean.state}
        if any(bool((changed[name] & ~left[name]).any() if name in left else changed[name].any()) for name in changed):
            return left
        return _some({name: places & changed[name] for name, places in left.items()})


def _some(masks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: mask for name, mask in masks.items() if bool(mask.any())}
