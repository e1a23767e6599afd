"""StepOrder: an executor takes the steps of one builder, each once and in order, and gives each one's results once.

Tables, pages and rounds advance with every step, so a step that runs twice, is skipped, or comes from another builder
would silently give wrong tokens. The first step of a new builder takes the executor over: its tables and pages no
longer match the former builder's view, and steps of that one are refused from there on.

A builder may abandon a step that raised on the way. The next step says so by the serial that it follows. The abandoned
one may or may not have been launched, and its results are not collected.
"""

from __future__ import annotations

import secrets

from phonograph.engine.passes.step import Step, Undone
from phonograph.errors import StepOrderError

_BITS = 40
"""Of a serial, for the steps of one builder; those above them name the builder."""
_NONE = -1


def first_serial() -> int:
    """What the first step of a new builder follows; random, so that builders of two processes differ too."""
    return secrets.randbits(62) << _BITS


class StepOrder:
    """Which step was launched last, and whose results were collected last."""

    def __init__(self) -> None:
        self._taken = self._sure = _NONE
        """The last step that was launched, and the last of which the builder has said since that it counts."""
        self.collected = _NONE
        """The last step whose results are on the host; where it is not what a step follows, `check_collect` says."""

    def take(self, step: Step) -> None:
        """Note a step that is launched now; raises where it is not the next one."""
        if step.follows != self._taken:
            self._check_launch(step)
        self._taken, self._sure = step.serial, step.follows

    def _check_launch(self, step: Step) -> None:
        """For whatever is not just the next step: one after others that were given up, or the first of a builder."""
        doing = f"launching {_said(step.serial)}"
        self._begin(step.follows, doing)
        if step.serial <= self._taken or step.follows < self._sure:
            raise StepOrderError(
                f"{doing}: {_said(self._taken)} was launched before. Launch each step once, in the order in which they "
                "were built."
            )
        if step.follows > self._taken:
            raise StepOrderError(
                f"{doing}: it follows {_said(step.follows)}, and {_said(self._taken)} was launched last. Launch every "
                "step that is built, in order, or give it up (StepBuilder.give_up_after)."
            )

    def check_put_back(self, undone: Undone) -> None:
        """Raises where rows would be put back that a step which counts has advanced."""
        doing = f"putting rows back to where they were after {_said(undone.follows)}"
        self._begin(undone.follows, doing)
        if undone.follows > self.collected:
            raise StepOrderError(
                f"{doing}: {_said(self.collected)} was collected last. Collect all steps before the one that is undone."
            )
        if undone.follows < self._sure:
            raise StepOrderError(
                f"{doing}: later ones were launched, up to {_said(self._taken)}. Undo a step before the next one is "
                "built."
            )

    def check_collect(self, step: Step) -> None:
        """Raises where the results of a launched step are not the next ones that count."""
        doing = f"collecting {_said(step.serial)}"
        if _builder(step.serial) != _builder(self.collected):
            raise _taken_over(doing)
        if step.serial <= self.collected:
            raise StepOrderError(
                f"{doing}: {_said(self.collected)} is collected already. Collect each launched step once, in launch "
                "order."
            )
        if step.follows > self.collected:
            raise StepOrderError(
                f"{doing}: it follows {_said(step.follows)}, and {_said(self.collected)} was collected last. Collect "
                "launched steps in launch order."
            )

    def _begin(self, follows: int, doing: str) -> None:
        """Let a builder that is new take over; raises where it is a former one that goes on."""
        if _builder(follows) == _builder(self._taken):
            return
        if _number(follows):
            raise _taken_over(doing)
        self._taken = self._sure = self.collected = follows


def _builder(serial: int) -> int:
    return serial >> _BITS


def _number(serial: int) -> int:
    return serial & ((1 << _BITS) - 1)


def _said(serial: int) -> str:
    return f"step {_number(serial)} of its builder"


def _taken_over(doing: str) -> StepOrderError:
    return StepOrderError(
        f"{doing}: the executor has steps of another builder, which write its tables and pages as if there were no "
        "other. Give each EngineCore an executor of its own, or make a new EngineCore once the other one is done."
    )
