"""A random EAGLE-3 head of a model's shape, as the folder that --draft takes: for measuring what a head costs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from phonograph.engine.models.config import ModelConfig


def write_random_head(folder: Path, target: ModelConfig, draft_vocab: int, dtype: torch.dtype) -> None:
    """With logits of its own for `draft_vocab` tokens, and three tapped layers where the target has so many."""
    numbers, hidden, last = torch.Generator().manual_seed(0), target.hidden, target.num_layers - 1
    vocab = min(draft_vocab, target.vocab)
    taps = sorted({min(1, last), target.num_layers // 2, last})

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=numbers) * columns**-0.5).to(dtype)

    size = {"q": target.num_heads, "k": target.num_kv_heads, "v": target.num_kv_heads}
    found = {
        f"midlayer.self_attn.{name}_proj": random(count * target.head_dim, 2 * hidden) for name, count in size.items()
    }
    found |= {
        "fc": random(hidden, len(taps) * hidden),
        "midlayer.self_attn.o_proj": random(hidden, target.num_heads * target.head_dim),
        "midlayer.mlp.gate_proj": random(target.intermediate, hidden),
        "midlayer.mlp.up_proj": random(target.intermediate, hidden),
        "midlayer.mlp.down_proj": random(hidden, target.intermediate),
        "lm_head": random(vocab, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    found |= {name: torch.ones(hidden, dtype=dtype) for name in norms}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": target.intermediate,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab,
        "draft_vocab_size": vocab,
        "max_position_embeddings": target.max_len,
        "rope_theta": target.rope_theta,
        "rms_norm_eps": target.rms_eps,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {f"{name}.weight": tensor for name, tensor in found.items()}
    save_file({**stored, "d2t": torch.zeros(vocab, dtype=torch.int64)}, folder / "model.safetensors")
