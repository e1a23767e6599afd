"""RandomHfCheckpoint: random weights of a shape in transformers' own model, made on the device: for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phonograph.engine.checkpoints.base import TensorInfo
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.models.registry import ARCHITECTURES
from phonograph.errors import PlanError
from phonograph.graphs.progress import Progress, silent
from phonograph.hf.adapter import attention
from phonograph.hf.adapter.loading import adapted, config_of, described, quiet, routing_of
from phonograph.hf.adapter.outline import Outline, outline_of
from phonograph.hf.adapter.shapes import HF_SHAPES


@dataclass(frozen=True)
class RandomHfCheckpoint(RandomCheckpoint):
    """For a shape that we have layers for, the weights of the native `RandomCheckpoint` of the same seed."""

    hf_config: Any = None
    outline: Outline = field(kw_only=True)

    @staticmethod
    def of(shape: str) -> RandomHfCheckpoint:
        """By the name of a shape: one that we have layers for, or one of transformers alone."""
        if shape in SHAPES:
            config = hf_config(SHAPES[shape])
        elif shape in HF_SHAPES:
            from transformers import AutoConfig

            kind, values = HF_SHAPES[shape]
            config = AutoConfig.for_model(kind, **values)
        else:
            raise PlanError(f"shape {shape!r} is unknown (known: {', '.join((*SHAPES, *HF_SHAPES))}).")
        with quiet():
            outline = outline_of(config, shape)
        ours = SHAPES[shape] if shape in SHAPES else replace(config_of(config, outline, ()), dtype=torch.bfloat16)
        return RandomHfCheckpoint(ours, hf_config=config, outline=outline)

    @property
    def names(self) -> dict[str, TensorInfo]:
        if self.config.architecture in ARCHITECTURES:
            return super().names
        return {"all weights": TensorInfo((1,), self.config.dtype, "random", self.config.dtype.itemsize)}

    def check(self, max_len: int) -> None:
        self.outline.refuse_beyond(self.source, max_len)

    def breaks(self) -> tuple[str, ...]:
        return self.outline.breaks

    def described(self, dtype: torch.dtype, device: torch.device) -> str:
        return described(self.outline, routing_of(self.outline, dtype, device))

    def model(self, parts: ModelParts, dtype: torch.dtype, device: torch.device, progress: Progress = silent) -> Model:
        self.check(parts.max_len)
        routing = routing_of(self.outline, dtype, device)
        # Of this seed, whatever was drawn before; draws that come later are as if there had been none.
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(self.seed)
            whole = made(self.hf_config, dtype, device, routing)
        self._fill(whole, device)
        progress("loading weights", 1, 1)
        with quiet():
            return adapted(whole, self.outline, self.config, parts, self.source, progress)

    @torch.no_grad()
    def _fill(self, whole: Any, device: torch.device) -> None:
        if self.config.architecture not in ARCHITECTURES:
            return  # they have what training begins with
        places = dict(whole.named_parameters())
        for name, tensor in self.tensors(device):
            places[name].copy_(tensor)


def made(config: Any, dtype: torch.dtype, device: torch.device, routing: str | None) -> Any:
    """A model of transformers, on the device, with what its authors begin training with."""
    from transformers import AutoModelForCausalLM

    options = {} if routing is None else {"experts_implementation": routing}
    attention.register()
    with quiet(), device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME, **options)


def hf_config(config: ModelConfig) -> Any:
    """The same shape in transformers' words."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        ARCHITECTURES[config.architecture].model_type,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        max_position_embeddings=config.max_len,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
