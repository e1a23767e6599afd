"""The layer check: deep routed models whose roundings grow are served in half precision, and faults are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import PLAIN, Queries, Scores, StepAttention
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import silent
from phonograph.hf.adapter import random
from phonograph.hf.adapter.loading import adapted, config_of
from phonograph.hf.adapter.model import HfModel
from phonograph.hf.adapter.outline import outline_of
from phonograph.hf.adapter.self_check import self_check
from phonograph.hf.adapter.twins import twin_of

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_RANGE = 0.2
"""Wide layers amplify by their width; narrow ones need larger weights for that."""
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt-oss": lambda: transformers.GptOssConfig(**_SIZES, num_local_experts=32, initializer_range=_RANGE),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, num_experts=32, moe_intermediate_size=64, norm_topk_prob=True, initializer_range=4 * _RANGE
    ),
    "Mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=32, initializer_range=2 * _RANGE),
}


def model_of(name: str, dtype: torch.dtype, attention: Any = None) -> HfModel:
    """Random, with biases that are not 0. Yarn, sinks and windows are gpt-oss's own."""
    torch.manual_seed(0)
    config, device = CONFIGS[name](), torch.device("cpu")
    outline = outline_of(config, name)
    whole = random.made(config, dtype, device, "batched_mm")
    with torch.no_grad():
        for path, one in whole.named_parameters():
            if path.endswith("proj.bias"):
                one.normal_(0, 0.3)
    parts = ModelParts(attention or ReferenceAttention(), ReferenceKernels(), 4096)
    ours = replace(config_of(config, outline, ()), dtype=dtype)
    return adapted(whole, outline, ours, parts, name, silent)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def gpt_oss(request: pytest.FixtureRequest) -> HfModel:
    return model_of("gpt-oss", request.param)


@pytest.mark.parametrize("name", CONFIGS)
def test_roundings_that_grow_are_no_fault(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    assert "by roundings that grow (given the same, attention of each layer differs by at most " in model.notes[0]
    layer = model.decoder.layers[0]
    assert not layer._forward_pre_hooks
    assert not layer.self_attn._forward_hooks


def test_float32_shows_that_they_are_roundings(gpt_oss: HfModel) -> None:
    found = self_check(gpt_oss, "gpt-oss")
    assert bool(found.by_layer) == (gpt_oss.dtype == torch.bfloat16)
    assert found.worst > 0.15 or (gpt_oss.dtype == torch.float32 and found.worst < 1e-4)


@dataclass(frozen=True)
class Wrong:
    """Attention with a fault: from a window and scores to others."""

    change: Callable[[int, int | None, Scores, int], tuple[int | None, Scores]]
    name = "wrong"

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        return _WrongStep(ReferenceAttention().prepare(cache, queries, num_heads), self)


@dataclass(frozen=True)
class _WrongStep:
    inner: StepAttention
    wrong: Wrong

    def attend(
        self, layer: int, q: torch.Tensor, window: int | None, out: torch.Tensor | None = None, scores: Scores = PLAIN
    ) -> torch.Tensor:
        window, scores = self.wrong.change(layer, window, scores, q.shape[-1])
        return self.inner.attend(layer, q, window, out, scores)


def _scaled(factor: float) -> Wrong:
    return Wrong(lambda _, window, scores, width: (window, scores._replace(scale=factor * width**-0.5)))


ATTENTIONS = {
    "scale": _scaled(1.2),
    "no sinks": Wrong(lambda _, window, scores, width: (window, scores._replace(sinks=None))),
    "no sinks in one layer": Wrong(
        lambda layer, window, scores, width: (window, scores._replace(sinks=None) if layer == 3 else scores)
    ),
    "window one longer": Wrong(lambda _, window, scores, width: (window and window + 1, scores)),
    "window one shorter": Wrong(lambda _, window, scores, width: (window and window - 1, scores)),
    "other layers' window": Wrong(lambda _, window, scores, width: (7 if window is None else None, scores)),
}


@pytest.mark.parametrize("fault", ATTENTIONS)
def test_attention_with_a_fault_is_refused(gpt_oss: HfModel, fault: str) -> None:
    where = "; given the same, attention of layer " if gpt_oss.dtype == torch.bfloat16 else "is rounding"
    with pytest.raises(CheckpointError, match=rf"other logits .*{where}"):
        self_check(replace(gpt_oss, attention=ATTENTIONS[fault]), fault)


def _changed(model: HfModel, path: str, **values: Any) -> HfModel:
    """The engine's layers have another module there; those that it is compared with have not."""
    module = model.decoder.get_submodule(path)
    other = copy.copy(module)
    for part in ("_parameters", "_buffers"):
        setattr(other, part, dict(getattr(module, part)))
    for name, value in values.items():
        setattr(other, name, value)
    return replace(model, fused=twin_of(model.decoder, {id(module): other}))


def _frequencies() -> torch.Tensor:
    return 150_000.0 ** -(torch.arange(0, 16, 2) / 16)


@pytest.mark.parametrize(
    ("path", "values", "where"),
    [
        ("rotary_emb", {"attention_scaling": 1.0}, "attention of layer 0"),
        ("rotary_emb", {"inv_freq": _frequencies()}, r"attention of layer \d"),
        ("layers.3.self_attn.v_proj", {"bias": None}, "attention of layer 3"),
        ("layers.4.input_layernorm", {"forward": lambda x: x}, "attention of layer 4"),
        ("layers.4.post_attention_layernorm", {"forward": lambda x: x}, "what layer 4 adds"),
        ("layers.5.post_attention_layernorm", {"forward": lambda x: x}, "what its last layer and its head give"),
        ("embed_tokens", {}, "what its embeddings give"),
    ],
    ids=["yarn's factor", "frequencies", "value bias", "norm", "second norm", "last norm", "embeddings"],
)  # fmt: skip
def test_layers_with_a_fault_are_refused(gpt_oss: HfModel, path: str, values: dict[str, Any], where: str) -> None:
    if path == "embed_tokens":
        values = {"forward": lambda ids: torch.ones(*ids.shape, 64, dtype=gpt_oss.dtype)}
    told = rf"; given the same, {where} .* of its size" if gpt_oss.dtype == torch.bfloat16 else "is rounding"
    with pytest.raises(CheckpointError, match=rf"other logits .*{told}"):
        self_check(_changed(gpt_oss, path, **values), path)


def test_float16_is_sharper() -> None:
    model = model_of("gpt-oss", torch.float16)
    with pytest.raises(CheckpointError, match="attention of layer 0 differs"):
        self_check(replace(model, attention=_scaled(1.03)), "float16")
