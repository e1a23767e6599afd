"""Failing drafters: one that reads the target, and raises or returns nonsense anywhere, changes no output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from drafted import REQUESTS
from phonograph.engine.passes.drafter_failures import DrafterFailures
from phonograph.engine.passes.drafting import Accepted, Drafting
from speculation import Driver, Switching, check, saying, speculating

METHODS = ("features", "read", "draft", "keep_up")


@dataclass
class Reading:
    """The protocol `ReadsTarget`; what is in `fails` raises, or returns what no caller can use."""

    fails: tuple[str, ...]
    answer: Any = None
    """Returned in place of the raise, where there is one."""
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    taps: tuple[int, ...] = (0, 1)
    kept: tuple[torch.Tensor, ...] = field(default_factory=lambda: (torch.zeros(4),))

    def _done(self, name: str, usual: Any) -> Any:
        if name not in self.fails:
            return usual
        if self.answer is None:
            raise ValueError(f"no idea how to {name}")
        return self.answer

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        found: torch.Tensor = self._done("features", taps[0] + taps[1])
        return found

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Any) -> None:
        assert features.shape[0] == following.shape[0]
        self._done("read", None)

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        assert accepted.features is not None
        found: torch.Tensor = self._done("draft", accepted.tokens[:, :1].repeat(1, depth))
        return found

    def keep_up(self, accepted: Accepted) -> None:
        self._done("keep_up", None)


def expect_plain_output(drafter: Reading, backend: str) -> DrafterFailures:
    core = speculating(Drafting("reading", 3, lambda parts: drafter), backend)
    core.scheduler.width = Switching((1, 4))
    check(Driver(core).run(REQUESTS[:6]))
    assert core.scheduler.counts.steps > 0
    return core.executor.parts.drafter_failures


SLOW = pytest.mark.slow


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["disabled", *(pytest.param(one, marks=SLOW) for one in ("full", "breakable"))])
@pytest.mark.parametrize("fails", [(), *((name,) for name in METHODS), METHODS], ids="+".join)
def test_a_raise_changes_no_output(fails: tuple[str, ...], backend: str, caplog: pytest.LogCaptureFixture) -> None:
    failures = expect_plain_output(Reading(fails), backend)
    said = [record.message for record in caplog.records if "the drafter failed" in record.message]
    assert bool(said) == bool(fails)
    assert all(any(f"no idea how to {name}" in one for one in said) for name in fails)
    assert len(said) == len(fails), "each once, however often it fails"
    assert failures.count >= len(said)


def of_shapes(accepted: Accepted) -> torch.Tensor:
    raise ValueError(f"no idea for {accepted.rows.shape[0]} rows")


@pytest.mark.faults
def test_the_first_failure_of_a_kind_is_a_warning_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Of each engine, and whatever numbers are in the message."""
    for _ in range(2):
        caplog.clear()
        core = speculating(saying(3, of_shapes), "disabled")
        failures = core.executor.parts.drafter_failures
        assert str(failures) == "", "a check of shapes, when the engine is made, is none"
        check(Driver(core).run(REQUESTS[:6]))
        (said,) = [record.message for record in caplog.records if "the drafter failed" in record.message]
        assert "nothing is drafted: ValueError: no idea for 1 rows. Later failures like this one are not logged" in said
        assert failures.count > 20
        assert str(failures) == f"the drafter failed in {failures.count} calls: see the warnings"


@SLOW
@pytest.mark.faults
def test_a_raise_in_what_is_compiled_changes_no_output() -> None:
    expect_plain_output(Reading(METHODS), "tc_piecewise")


@pytest.mark.faults
@pytest.mark.parametrize("answer", [torch.zeros(3, 7), torch.zeros(0), "nothing"], ids=["shape", "empty", "type"])
def test_nonsense_in_the_place_of_features_changes_no_output(answer: Any) -> None:
    expect_plain_output(Reading(("features",), answer), "disabled")
