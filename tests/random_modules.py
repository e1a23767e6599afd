"""Random MTP modules for the tiny model, as the folder that --draft takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from phonograph.engine.models.config import SHAPES

TARGET = SHAPES["tiny"]
HIDDEN = TARGET.hidden


def tensors(count: int = 2, *, has_head: bool = True) -> dict[str, torch.Tensor]:
    """Random ones, of layers with other heads than the target's."""
    numbers, found = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()

    def random(*shape: int) -> torch.Tensor:
        found: torch.Tensor = torch.randn(shape, generator=numbers) * 2 / shape[-1] ** 0.5
        return found

    for index in range(count):
        own = f"model.layers.{TARGET.num_layers + index}"
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
        found |= {f"{own}.{name}.weight": 1 + random(HIDDEN) for name in norms}
        found |= {f"{own}.eh_proj.weight": random(HIDDEN, 2 * HIDDEN)}
        found |= {f"{own}.self_attn.q_proj.weight": random(96, HIDDEN)}
        found |= {f"{own}.self_attn.{name}_proj.weight": random(48, HIDDEN) for name in "kv"}
        found |= {f"{own}.self_attn.o_proj.weight": random(HIDDEN, 96)}
        found |= {f"{own}.mlp.{name}_proj.weight": random(80, HIDDEN) for name in ("gate", "up")}
        found |= {f"{own}.mlp.down_proj.weight": random(HIDDEN, 80)}
        found |= {f"{own}.embed_tokens.weight": random(1, 1)}  # shared with the target, and not read
        if has_head:
            found |= {f"{own}.shared_head.head.weight": random(TARGET.vocab, HIDDEN)}
    return found


def config(**changes: Any) -> dict[str, Any]:
    usual = {
        "architectures": ["LlamaForCausalLMNextN"], "model_type": "llama", "num_hidden_layers": TARGET.num_layers,
        "hidden_size": HIDDEN, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 16, "vocab_size": TARGET.vocab, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0, "num_nextn_predict_layers": 2,
    }  # fmt: skip
    return {**usual, **changes}


def written(folder: Path, found: dict[str, torch.Tensor] | None = None, count: int = 2, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**{"num_nextn_predict_layers": count, **changes})))
    save_file(tensors(count) if found is None else found, folder / "model.safetensors")
    return folder
