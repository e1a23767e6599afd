"""Streams a checkpoint's tensors into the fused matrices of the decoder."""

from __future__ import annotations

import torch

from phonograph.engine.checkpoints.base import Checkpoint
from phonograph.engine.kernels.base import Heads, Norm
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import LayerWeights, Weights
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import Progress, silent


class _Targets:
    """Allocates weights and notes where each tensor of the checkpoint goes."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.places: dict[str, torch.Tensor] = {}

    def one(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of its own."""
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.places[name] = made
        return made

    def norm(self, name: str, size: int, eps: float) -> Norm:
        return Norm(self.one(name, size), eps)

    def stacked(self, rows: dict[str, int], *rest: int) -> torch.Tensor:
        """One tensor whose rows are those of several."""
        made = torch.empty((sum(rows.values()), *rest), dtype=self._dtype, device=self._device)
        start = 0
        for name, count in rows.items():
            self.places[name] = made[start : start + count]
            start += count
        return made


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress = silent
) -> Weights:
    """All weights, on the device and in this precision; one stored tensor at a time is held besides."""
    refuse_unsupported(checkpoint)
    config = checkpoint.config
    targets = _Targets(dtype, device)
    weights = _allocate(config, targets)
    total = len(checkpoint.names)
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for index, (name, tensor) in enumerate(checkpoint.tensors(device=device)):
            if name in targets.places:
                sums[name] = targets.places[name].copy_(tensor).sum()
            progress("loading weights", index + 1, total)
        _refuse_not_finite(checkpoint.source, targets.places, sums)
    return weights


def refuse_unsupported(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose weights have no place in the decoder, before any of them is read."""
    if checkpoint.config.o_bias or checkpoint.config.mlp_bias:
        raise CheckpointError(
            f"loading {checkpoint.source}: biases in the output projection or the MLP are not supported."
        )


def _refuse_not_finite(source: str, places: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> None:
    """Refuse NaN and infinite weights; a sum that is finite, as nearly all are, shows that every weight is."""
    if not sums or bool(torch.stack(list(sums.values())).isfinite().all()):
        return
    for name, total in sums.items():
        if not total.isfinite() and (num_bad := int((~places[name].isfinite()).sum())):
            dtype = str(places[name].dtype).removeprefix("torch.")
            raise CheckpointError(
                f"loading {source}: {num_bad:,} of the {places[name].numel():,} values of {name} are NaN or infinite "
                f"in {dtype}. The file is damaged, or its values are too large for {dtype}: get it again, or ask for "
                "another dtype."
            )


def _allocate(config: ModelConfig, targets: _Targets) -> Weights:
    embedding = targets.one("model.embed_tokens.weight", config.vocab, config.hidden)
    layers = tuple(_layer(config, targets, index) for index in range(config.num_layers))
    norm = targets.norm("model.norm.weight", config.hidden, config.rms_eps)
    head = embedding if config.tied_embeddings else targets.one("lm_head.weight", config.vocab, config.hidden)
    return Weights(embedding, layers, norm, head)


def _layer(config: ModelConfig, targets: _Targets, index: int) -> LayerWeights:
    at = f"model.layers.{index}"
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q": q, "k": kv, "v": kv}
    qkv = {f"{at}.self_attn.{name}_proj.weight": size for name, size in rows.items()}
    biases = {f"{at}.self_attn.{name}_proj.bias": size for name, size in rows.items()}
    mlp = {f"{at}.mlp.{name}_proj.weight": config.intermediate for name in ("gate", "up")}
    q_norm, k_norm = (
        targets.norm(f"{at}.self_attn.{name}_norm.weight", config.head_dim, config.rms_eps) if config.qk_norm else None
        for name in ("q", "k")
    )
    return LayerWeights(
        input_norm=targets.norm(f"{at}.input_layernorm.weight", config.hidden, config.rms_eps),
        qkv=targets.stacked(qkv, config.hidden),
        qkv_bias=targets.stacked(biases) if config.qkv_bias else None,
        heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm),
        out=targets.one(f"{at}.self_attn.o_proj.weight", config.hidden, q),
        mlp_norm=targets.norm(f"{at}.post_attention_layernorm.weight", config.hidden, config.rms_eps),
        gate_up=targets.stacked(mlp, config.hidden),
        down=targets.one(f"{at}.mlp.down_proj.weight", config.hidden, config.intermediate),
        window=config.window(index),
    )
