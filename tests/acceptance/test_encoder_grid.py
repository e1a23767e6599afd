"""Encoders by batch × length: what they put out for used rows is what they put out eagerly."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from hugging_face import ENCODERS, VOCAB, made, prompt
from phonograph import BufferPool, Dim, Graphed, GraphedGrid, Pad, Reason, Slot, graphed, open_device
from phonograph.graphs.progress import silent

FAST = {"bert", "modernbert", "t5 encoder"}
"""The others run with the slow tests."""


@pytest.mark.parametrize(
    "name", [one if one in FAST else pytest.param(one, marks=pytest.mark.slow) for one in ENCODERS]
)
def test_an_encoder_by_batch_and_length(name: str) -> None:
    model = made(ENCODERS[name])
    pool = BufferPool(open_device("emulated"))

    def encode(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    pad = Pad.fill(model.config.pad_token_id or 0)
    slots = [
        Slot("input_ids", ("seqs", "length"), torch.int64, pad=pad, valid=(0, VOCAB - 1)),
        Slot("attention_mask", ("seqs", "length"), torch.int64, pad=Pad.fill(0), valid=(0, 1)),
    ]

    def by_length(length: int) -> Graphed:
        dims = [Dim("length", limit=length)]
        return graphed(encode, slots=slots, bucketed="seqs", buckets=[1, 4], dims=dims, pool=pool, device="emulated")

    run = GraphedGrid(by_length, dim="length", sizes=[8, 24])
    assert not any(report.failures for report in run.capture(silent).values())
    assert all(report.ok for report in run.verify().values())
    with torch.no_grad():
        for seed, (num_seqs, length) in enumerate([(1, 1), (1, 8), (2, 5), (3, 9), (4, 24), (4, 1), (5, 8), (1, 25)]):
            used = torch.randint(1, length + 1, (num_seqs, 1), generator=torch.Generator().manual_seed(seed))
            ids, mask = prompt(num_seqs, length, seed), (torch.arange(length) < used).long()
            found, wanted = run(ids, mask), encode(ids, mask)
            assert found.shape == wanted.shape
            torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-5)
    assert run.replays == 6
    assert run.eager == {Reason.TOO_LARGE: 2}
