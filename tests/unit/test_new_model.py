"""docs/new-model.md: its example, taken from the page, is a family that loads, computes and records."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from phonograph import LLM, CheckpointError, EngineOptions, SamplingParams
from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models import registry
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import Queries
from phonograph.graphs.planning.settings import ask

PAGE = Path(__file__).parents[2] / "docs" / "new-model.md"
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "residual_multiplier": 0.4,
    "torch_dtype": "float32",
}
PROMPT = (5, 9, 100, 7, 31, 8, 77)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's first block as a module, registered by its second."""
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "toy.py"
    path.write_text(module)
    spec = importlib.util.spec_from_file_location("toy", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy", made)
    spec.loader.exec_module(made)
    for name, entry in eval(f"{{{line}}}", {"Architecture": registry.Architecture, "toy": made}).items():
        monkeypatch.setitem(registry.ARCHITECTURES, name, entry)
    return made


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of random weights as others would publish it; norms are not one, so that they count."""
    numbers = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(tensor.shape, generator=numbers) * (0.3 if tensor.ndim == 1 else 0.15)
        + ("norm" in name) * 0.5
        for name, tensor in RandomCheckpoint(registry.config_from_hf(CONFIG)).tensors()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def by_torch(tensors: dict[str, torch.Tensor], tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits after every token, in float64, without pages, kernels or fused matrices."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    count, dim = len(tokens), 16

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (64,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def turned(x: torch.Tensor) -> torch.Tensor:
        frequencies = 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.outer(torch.arange(count).double(), frequencies).repeat(1, 2)[:, None]
        rotated = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * angles.cos() + rotated * angles.sin()

    x = w["model.embed_tokens.weight"][list(tokens)]
    for layer in range(3):
        at = f"model.layers.{layer}"
        h = normed(x, f"{at}.input_layernorm")
        q, k, v = ((h @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(count, -1, dim) for name in "qkv")
        q, k, v = (part.transpose(0, 1) for part in (turned(q), turned(k), v))
        mixed = functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
        )
        x = x + 0.4 * mixed.transpose(0, 1).flatten(1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = normed(x, f"{at}.post_attention_layernorm")
        gated = functional.silu(h @ w[f"{at}.mlp.gate_proj.weight"].T) * (h @ w[f"{at}.mlp.up_proj.weight"].T)
        x = x + 0.4 * gated @ w[f"{at}.mlp.down_proj.weight"].T
    return normed(x, "model.norm") @ w["lm_head.weight"].T


def test_its_logits_are_those_of_plain_torch(toy: ModuleType, tmp_path: Path) -> None:
    wanted = by_torch(saved(tmp_path / "toy"), PROMPT)
    parts = ModelParts(ReferenceAttention(), ReferenceKernels(), max_len=32)
    model = load_model(open_checkpoint(tmp_path / "toy"), parts, torch.float32, torch.device("cpu"))
    assert type(model).__name__ == "Toy"
    cache = CacheGroup.empty(model.keeps, 4, 4, dtype=model.dtype, device=torch.device("cpu"))
    count = len(PROMPT)
    table = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32)
    queries = Queries(torch.ones(count, dtype=torch.int64), torch.arange(count), table, False)
    found = model.hidden(torch.tensor(PROMPT), queries, cache, taps=(1,))
    torch.testing.assert_close(model.logits(found.states).double(), wanted, rtol=1e-4, atol=1e-4)
    assert found.taps[0].shape == (count, 64)


@pytest.mark.parametrize(
    ("device", "backends"),
    [("cpu", {}), ("emulated", {}), ("emulated", {"prefill": "breakable"})],
)
def test_its_tokens_are_those_of_plain_torch(
    toy: ModuleType, tmp_path: Path, device: str, backends: dict[str, str]
) -> None:
    tensors = saved(tmp_path / "toy")
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase, backend in backends.items()]
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=64, cache_tokens=256, page_size=4)
    checkpoint: Any = _Untold(registry.config_from_hf(CONFIG), tensors)
    llm = LLM(checkpoint, device=device, options=options, asked=asked)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for done in llm.generate([PROMPT, PROMPT[2:5]], params):
        known = done.prompt
        for token in done.tokens:
            best = by_torch(tensors, known)[-1].topk(2)
            assert token == best.indices[0] or best.values[0] - best.values[1] < 1e-3
            known = (*known, token)
    if device == "emulated":
        assert llm.executor.runners["decode"].stats.eager.total() == 0


class _Untold(RandomCheckpoint):
    """Weights that are given, for a model without a tokenizer."""

    def __init__(self, config: Any, given: dict[str, torch.Tensor]) -> None:
        super().__init__(config)
        object.__setattr__(self, "_given", given)

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        given: dict[str, torch.Tensor] = self.__dict__["_given"]
        yield from given.items()


def test_what_it_reads_is_known_to_nobody_else(toy: ModuleType) -> None:
    assert registry.config_from_hf(CONFIG).architecture == "ToyForCausalLM"
    llama = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with pytest.raises(CheckpointError, match=r"residual_multiplier is 0\.4"):
        registry.config_from_hf(llama)
