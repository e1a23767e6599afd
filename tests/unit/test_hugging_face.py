"""Unmodified Hugging Face models: encoders, a prefill without a cache, and decoding over static caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DistilBertConfig,
    DynamicCache,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    ModernBertConfig,
    PretrainedConfig,
    Qwen3Config,
    RobertaConfig,
    StaticCache,
    T5Config,
    T5EncoderModel,
)

from phonograph import Buckets, Pad, Slot, graphed
from phonograph.graphs.progress import silent

VOCAB, LENGTH, WINDOW = 64, 8, 6
NARROW = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
}
GROUPED = {**NARROW, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
SLIDING = {**GROUPED, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: AutoModel.from_config(BertConfig(**NARROW)),
    "roberta": lambda: AutoModel.from_config(RobertaConfig(**NARROW, pad_token_id=1)),
    "distilbert": lambda: AutoModel.from_config(
        DistilBertConfig(dim=16, hidden_dim=32, n_layers=2, n_heads=2, vocab_size=VOCAB)
    ),
    "modernbert": lambda: AutoModel.from_config(
        ModernBertConfig(**NARROW, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    ),
    "t5 encoder": lambda: T5EncoderModel(
        T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCAB)
    ),
    "llama prefill": lambda: AutoModel.from_config(LlamaConfig(**GROUPED), attn_implementation="sdpa"),
}
DECODERS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**GROUPED),
    "gemma 3": Gemma3TextConfig(**SLIDING),
    "gpt-oss": GptOssConfig(**SLIDING, num_local_experts=2, num_experts_per_tok=1),
}


def slot(name: str, length: int, high: int) -> Slot:
    return Slot(name, ("seqs", length), torch.int64, pad=Pad.fill(1), valid=(1, high))


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_recorded_and_right(name: str) -> None:
    torch.manual_seed(0)
    model = ENCODERS[name]().eval()
    extra = {"use_cache": False} if name == "llama prefill" else {}

    def encode(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask, **extra).last_hidden_state

    slots = [slot("input_ids", LENGTH, VOCAB - 1), slot("attention_mask", LENGTH, 1)]
    made = graphed(encode, slots=slots, bucketed="seqs", buckets=[1, 4], device="emulated")
    report = made.capture(silent)
    assert not report.failures, report
    verified = made.verify()
    assert verified.ok, verified
    ids = torch.randint(2, VOCAB, (3, LENGTH))
    mask = (torch.arange(LENGTH) < torch.tensor([[3], [8], [5]])).long()
    with torch.no_grad():
        torch.testing.assert_close(made(ids, mask), encode(ids, mask))
    assert made.stats.replays.total() == 1


def logits_of(decode: Callable[[torch.Tensor], torch.Tensor], *, recorded: bool) -> tuple[list[torch.Tensor], Any]:
    """Logits of some greedy tokens; recorded before the first of them."""
    step: Any = decode
    if recorded:
        exact = Buckets.of(1, exact=True)
        slots = [slot("input_ids", 1, VOCAB - 1)]
        step = graphed(decode, slots=slots, bucketed="seqs", buckets=exact, device="emulated")
        step.capture(silent)
        step.verify()
    token, logits = torch.tensor([[3]]), []
    with torch.no_grad():
        for _ in range(2 * WINDOW):
            logits.append(step(token))
            token = logits[-1].argmax(-1, keepdim=True)
    return logits, step


@pytest.mark.parametrize("prompt", [0, 4])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_over_a_static_cache_is_right_from_the_first_token(name: str, prompt: int) -> None:
    """Sliding windows count their tokens in Python: refused by name, and nothing has moved."""
    torch.manual_seed(0)
    config = DECODERS[name]
    model = AutoModelForCausalLM.from_config(config).eval()

    def decoder() -> Callable[[torch.Tensor], torch.Tensor]:
        cache = StaticCache(config=config, max_cache_len=32)
        if prompt:
            with torch.no_grad():
                model(input_ids=torch.arange(3, 3 + prompt)[None], past_key_values=cache, use_cache=True)
        return lambda input_ids: model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[:, -1]

    wanted, _ = logits_of(decoder(), recorded=False)
    found, step = logits_of(decoder(), recorded=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    if name == "qwen3":
        assert step.stats.replays.total() == 2 * WINDOW
    else:
        (row,) = step.runner.report.failures
        assert "StaticSlidingWindowLayer.cumulative_length_int" in str(row.error)
        assert "cache_utils.py:" in str(row.error)


def test_a_recurrent_cache_that_the_model_makes_itself_is_recorded_from_the_first_token() -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=VOCAB, conv_kernel=3)
    model = AutoModelForCausalLM.from_config(config).eval()

    def decoder() -> Callable[[torch.Tensor], torch.Tensor]:
        cache = DynamicCache(config=config)
        return lambda input_ids: model(input_ids=input_ids, cache_params=cache, use_cache=True).logits[:, -1]

    wanted, _ = logits_of(decoder(), recorded=False)
    found, step = logits_of(decoder(), recorded=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert step.stats.replays.total() == 2 * WINDOW
