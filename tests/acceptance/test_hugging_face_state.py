"""Hugging Face models whose Python state lies deep: flags of cross-attention, a table of attention functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers as hf

from hugging_face import DECODERS, VOCAB, made, prompt
from phonograph import Buckets, Graphed, Pad, Slot, graphed
from phonograph.graphs.progress import silent

LENGTH, WIDTH = 7, 16
IDS = Slot("input_ids", ("seqs", 1), torch.int64, pad=Pad.fill(1), valid=(1, VOCAB - 1))
ENCODED = Slot("encoded", ("seqs", LENGTH, WIDTH), torch.float32)


class CrossDecoding:
    """The decoder of a T5 over static caches, of which one keeps the keys and values of the encoder's output."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = hf.T5Config(d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCAB)
        self.decoder = hf.T5ForConditionalGeneration(config).eval().get_decoder()
        caches = [hf.StaticCache(config=config, max_cache_len=length) for length in (24, LENGTH)]
        self.cache = hf.EncoderDecoderCache(*caches)

    def decode(self, input_ids: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        out = self.decoder(input_ids=input_ids, encoder_hidden_states=encoded, past_key_values=self.cache)
        return out.last_hidden_state[:, -1]

    def recorded(self) -> Graphed:
        exact = Buckets.of(1, exact=True)
        run = graphed(self.decode, slots=[IDS, ENCODED], bucketed="seqs", buckets=exact, device="emulated")
        run.capture(silent)
        return run


@torch.no_grad()
def two_texts(one: CrossDecoding, *, record_at: int | None) -> tuple[list[torch.Tensor], Graphed | None]:
    """Outputs of tokens over two encoded texts, with a reset of the cache between them."""
    step: Callable[..., torch.Tensor] = one.decode
    run: Graphed | None = None
    found = []
    for index in range(10):
        if index == record_at:
            step = run = one.recorded()
        if index == 5:
            one.cache.reset()
        encoded = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(index // 5))
        found.append(step(prompt(1, 1, seed=index), encoded))
    return found, run


@pytest.mark.parametrize("record_at", [0, 2])
def test_cross_attention_reads_the_text_of_its_call(record_at: int) -> None:
    """Recorded before the first token, the encoder's keys would be those of a sample: refused. Later, a reset says that
    they are to be made again: seen."""
    wanted, _ = two_texts(CrossDecoding(), record_at=None)
    found, run = two_texts(CrossDecoding(), record_at=record_at)
    assert all(map(torch.equal, found, wanted))
    assert run is not None
    assert run.runner.report is not None
    if record_at == 0:
        assert "StaticLayer.keys of its inputs" in str(run.runner.report.failures[0].error)
    else:
        assert not run.runner.report.failures
        assert run.stats.replays.total() == 7


def test_another_attention_function_of_the_same_name_is_seen() -> None:
    """The model asks a table for its function, by a name from its config."""
    table: Any = hf.AttentionInterface()
    own = table["sdpa"]
    model = made(DECODERS["llama"])
    caches = [hf.StaticCache(config=model.config, max_cache_len=24) for _ in range(2)]
    eager, served = (
        lambda input_ids, cache=cache: model(input_ids=input_ids, past_key_values=cache).logits[:, -1]
        for cache in caches
    )
    run = graphed(served, slots=[IDS], bucketed="seqs", buckets=Buckets.of(1, exact=True), device="emulated")
    assert not run.capture(silent).failures

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output, weights = own(*args, **kwargs)
        return output * 2, weights

    try:
        for index, function in enumerate((own, doubled, own)):
            hf.AttentionInterface.register("sdpa", function)
            with torch.no_grad():
                token = prompt(1, 1, seed=index)
                assert torch.equal(run(token), eager(token))
            assert run.stats.replays.total() == (1, 1, 2)[index]
    finally:
        hf.AttentionInterface.register("sdpa", own)
