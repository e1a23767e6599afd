"""Builds runners and toy models for tests, in a few lines each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phonograph import BufferPool, Device, Extent, Phase, PhasePlan, Runner, RunnerOptions, Slot
from phonograph.graphs.progress import silent

WIDTH = 4


def phase_plan(
    *sizes: int, backend: str = "full", exact: bool = False, ratio: float = 2.0, rows: int = 256
) -> PhasePlan:
    return PhasePlan(
        backend=backend,  # type: ignore[arg-type]
        buckets=tuple(sizes),
        exact=exact,
        max_padding_ratio=ratio,
        max_padding_rows=rows,
    )


def x_slot(dim: str = "seqs") -> Slot:
    return Slot("x", (dim, WIDTH), torch.float32)


def sample_x(device: Device, dim: str = "seqs") -> Callable[[Extent, int], dict[str, Any]]:
    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(extent.used[dim], WIDTH, generator=generator).to(device.torch_device)}

    return sample


def make_runner(
    body: Callable[..., Any],
    device: Device,
    *,
    sizes: Sequence[int] = (2, 4, 8),
    backend: str = "full",
    exact: bool = False,
    slots: Sequence[Slot] | None = None,
    options: RunnerOptions = RunnerOptions(),
    pool: BufferPool | None = None,
    capture: bool = True,
    **phase: Any,
) -> Runner:
    """A captured runner of a phase with the one input `x`, unless told otherwise."""
    declared = Phase(
        name=phase.pop("name", "decode"),
        slots=tuple(slots if slots is not None else [x_slot()]),
        bucketed=phase.pop("bucketed", "seqs"),
        body=body,
        sample=phase.pop("sample", None) or sample_x(device),
        **phase,
    )
    runner = Runner(declared, device, phase_plan(*sizes, backend=backend, exact=exact), pool=pool, options=options)
    if capture:
        runner.capture(silent)
    return runner


def rows(device: Device, count: int, seed: int = 1) -> torch.Tensor:
    """Random rows on the device."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device.torch_device)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted.cpu())
