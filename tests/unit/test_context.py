"""current(): answers everywhere, nests, and restores."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from phonograph import Device, Stage, current, graph_break
from phonograph.graphs.phases.context import Current, entering
from runners import make_runner, rows


def note(seen: Mock) -> None:
    now = current()
    seen(now.phase, now.backend, now.stage)


def test_outside_of_everything() -> None:
    assert current() == Current(None, None, Stage.EAGER, None)


def test_phase_backend_and_stage_wherever_it_is_asked(device: Device) -> None:
    seen = Mock()

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        note(seen)
        return x

    def body(batch: dict[str, Any]) -> torch.Tensor:
        return gap(batch["x"])

    def tail(hidden: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        note(seen)
        return hidden

    runner = make_runner(body, device, sizes=(4,), backend="breakable", tail=tail)
    assert {call.args[2] for call in seen.call_args_list} == {Stage.WARMING, Stage.CAPTURING}
    seen.reset_mock()
    runner.run({"x": rows(device, 3)})
    runner.run({"x": rows(device, 5)})
    replaying, eager = ("decode", "breakable", Stage.REPLAYING), ("decode", "breakable", Stage.EAGER)
    assert [call.args for call in seen.call_args_list] == [replaying, replaying, eager, eager]


def test_it_nests_and_restores_also_on_exceptions() -> None:
    outer, inner = Current("decode", "full", Stage.REPLAYING), Current("draft", "full", Stage.EAGER)
    with entering(outer):
        with entering(inner):
            assert current() is inner
        with pytest.raises(KeyError), entering(inner):
            raise KeyError
        assert current() is outer
    assert current().phase is None


def test_the_live_batch_is_without_padding_on_replay_and_eager(device: Device) -> None:
    sizes: list[int] = []

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        sizes.append(current().batch["x"].shape[0])
        return x

    runner = make_runner(lambda batch: gap(batch["x"]), device, sizes=(4,), backend="breakable")
    sizes.clear()
    runner.run({"x": rows(device, 3)})
    runner.run({"x": rows(device, 7)})
    assert sizes == [3, 7]
