"""verify compares state with what a run without padding leaves, wherever a live row may read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from phonograph import DeclarationError, Device, Extent, Pad, Slot, VerifyReport, verify
from runners import WIDTH, make_runner, rows, x_slot


def failed(report: VerifyReport) -> set[str]:
    return {check.name for check in report.failures}


def cache_slot(*, null: bool = False) -> Slot:
    return Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=null), valid=(0, 16))


def sample_rows(device: Device) -> Any:
    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["seqs"]
        return {"x": rows(device, count, seed), "rows": torch.arange(1, count + 1, device=device.torch_device)}

    return sample


def test_a_count_of_rows_is_found(device: Device) -> None:
    seen = torch.zeros(1, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        seen.add_(batch["x"].shape[0])
        return batch["x"] * 2

    report = verify(make_runner(body, device))
    assert failed(report) == {"state"}
    assert "the state seen differs by up to 3" in str(report)
    assert not seen.any()


def test_an_average_over_padded_rows_is_found(device: Device) -> None:
    mean = torch.zeros(WIDTH, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        mean.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        return batch["x"] * 2

    assert failed(verify(make_runner(body, device))) == {"state"}


def test_a_batch_norm_in_training_is_found_and_left_alone(device: Device) -> None:
    """Its op writes the running mean without saying so."""
    norm = torch.nn.BatchNorm1d(WIDTH).to(device.torch_device).train()
    report = verify(make_runner(lambda batch: norm(batch["x"]), device, smallest=2))
    assert failed(report) == {"unpadded", "state"}
    assert "BatchNorm1d.running_mean" in str(report)
    assert not norm.running_mean.any()  # type: ignore[union-attr]
    assert int(norm.num_batches_tracked) == 0  # type: ignore[arg-type]


def test_a_masked_average_is_right(device: Device) -> None:
    """Padding brings a mask of 0, so the state does not see it."""
    mean = torch.zeros(WIDTH, device=device.torch_device)
    mask = Slot("mask", ("seqs",), torch.float32, pad=Pad.fill(0))

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["seqs"]
        return {"x": rows(device, count, seed), "mask": torch.ones(count, device=device.torch_device)}

    def body(batch: Any) -> torch.Tensor:
        weights = batch["mask"][:, None]
        mean.mul_(0.9).add_((batch["x"] * weights).sum(0) / weights.sum(), alpha=0.1)
        return batch["x"] * 2

    assert verify(make_runner(body, device, slots=[x_slot(), mask], sample=sample))


def test_a_scratch_buffer_is_no_state_that_padding_changes(device: Device) -> None:
    """Every run writes the rows that it reads: what padding left there, nobody sees."""
    scratch = torch.zeros(8, WIDTH, device=device.torch_device)
    counts = torch.zeros(8, dtype=torch.int64, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        used = scratch[: batch["x"].shape[0]]
        used.copy_(batch["x"] + 1)
        counts[: len(used)] = torch.arange(1, len(used) + 1, device=used.device)
        return used * 2 + counts[: len(used), None]

    assert verify(make_runner(body, device))


def test_a_page_that_one_full_batch_happens_to_write_is_no_scratch_buffer(device: Device) -> None:
    """Padding writes the last page; the first full batch that is tried writes it too, and the next one does not."""
    cache = torch.zeros(8, WIDTH, device=device.torch_device)
    slot = Slot("pages", ("seqs",), torch.int64, pad=Pad.fill(7), valid=(0, 7))

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["seqs"]
        pages = torch.arange(count) * 2 + (seed + 3) % 2
        return {"x": rows(device, count, seed), "pages": pages.to(device.torch_device)}

    def body(batch: Any) -> torch.Tensor:
        cache[batch["pages"]] = batch["x"] + 1
        return batch["x"] * 2

    report = verify(make_runner(body, device, slots=[x_slot(), slot], sample=sample, sizes=(4,)))
    assert failed(report) == {"state"}
    assert "padding writes 4 of 32 elements of the state cache" in str(report)


def test_rows_that_add_up_are_no_scratch_buffer(device: Device) -> None:
    """The next, larger batch reads what padding added to its rows."""
    total = torch.zeros(8, WIDTH, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        used = total[: batch["x"].shape[0]]
        used.add_(batch["x"] + 1)
        return used * 2

    report = verify(make_runner(body, device))
    assert failed(report) == {"state"}
    assert "padding writes" in str(report)


def test_a_declared_null_row_does_not_cover_other_rows(device: Device) -> None:
    """Padding writes row 0, as declared, and also rows that it finds by its place in the batch."""
    cache = torch.zeros(25, WIDTH, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        at, x = batch["rows"], batch["x"]
        cache[at] = x + 1
        cache[17 : 17 + at.shape[0]].add_(x + 3)
        return x * 2

    slots = [x_slot(), cache_slot(null=True)]
    report = verify(make_runner(body, device, slots=slots, sample=sample_rows(device)))
    assert failed(report) == {"state"}
    assert "besides the null row that 'rows' declares" in str(report)


def test_a_count_is_no_null_row(device: Device) -> None:
    """A batch of nothing but padding writes the count too, but so does every live one."""
    cache, seen = torch.zeros(17, WIDTH), torch.zeros(1)
    cache, seen = cache.to(device.torch_device), seen.to(device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        cache[batch["rows"]] = batch["x"] + 1
        seen.add_(batch["x"].shape[0])
        return batch["x"] * 2

    slots = [x_slot(), cache_slot(null=True)]
    report = verify(make_runner(body, device, slots=slots, sample=sample_rows(device)))
    assert failed(report) == {"state"}
    assert "the state seen" in str(report)
    assert "state cache" not in str(report)


@pytest.mark.parametrize("named", [False, True])
def test_what_preserve_yields_is_compared(device: Device, named: bool) -> None:
    """A phase that saves its state itself says which of it live rows may read; without a word, all is found."""
    cache, seen = torch.zeros(17, WIDTH), torch.zeros(1)
    cache, seen = cache.to(device.torch_device), seen.to(device.torch_device)

    @contextmanager
    def preserve(batch: Any) -> Iterator[Mapping[str, torch.Tensor] | None]:
        held = cache.clone(), seen.clone()
        try:
            yield {"live rows": cache[1:], "seen": seen} if named else None
        finally:
            cache.copy_(held[0])
            seen.copy_(held[1])

    def runner(by: int) -> Any:
        def body(batch: Any) -> torch.Tensor:
            cache[batch["rows"]] = batch["x"] + 1
            seen.add_(batch["x"].shape[0] * by)
            return batch["x"] * 2

        slots = [x_slot(), cache_slot(null=not named)]
        return make_runner(body, device, slots=slots, sample=sample_rows(device), preserve=preserve)

    assert failed(verify(runner(by=1))) == {"state"}
    assert verify(runner(by=0))
    assert not cache.any()


def test_a_pad_without_a_value_has_no_null_row() -> None:
    with pytest.raises(DeclarationError, match="names no null row"):
        Pad(None, because="nobody looks", null=True)
