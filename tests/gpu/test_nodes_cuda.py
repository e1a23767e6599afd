"""Nodes of real CUDA graphs: read, named, and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph import Extent, RunnerOptions, open_device
from phonograph.graphs.trust.guard import guard
from runners import WIDTH, make_runner, rows

pytestmark = pytest.mark.gpu


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(extent.used["seqs"], WIDTH, generator=numbers).cuda()
    return {"x": x, "scale": 1 / (1 + seed)}


def test_a_frozen_number_is_in_the_nodes_and_correct_ones_agree() -> None:
    device = open_device("cuda")
    weight = torch.randn(WIDTH, WIDTH, device="cuda")

    def right(batch: dict[str, Any]) -> Any:
        return (batch["x"] @ weight).relu() + torch.rand_like(batch["x"])

    def wrong(batch: dict[str, Any]) -> Any:
        return batch["x"] * batch["scale"]

    good = make_runner(right, device, sample=sample, sizes=(4, 8))
    report = guard(good, nodes=True)
    assert report.ok, report
    assert not any("nodes unseen" in text for text in report.unseen), report
    assert good.run({"x": rows(device, 3), "scale": 1.0}).shape == (3, WIDTH)

    bad = make_runner(wrong, device, sample=sample, sizes=(4,), options=RunnerOptions(guard="off"))
    assert not guard(bad, nodes=True).ok
