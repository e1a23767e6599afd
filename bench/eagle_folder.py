"""A bare EAGLE-3 head (tensors q, k, v, o, gate, up, down, fc, norms and draft_ids) as the folder that --draft takes.

    python bench/eagle_folder.py HEAD.safetensors FOLDER

Such a head is one of SmolLM2-135M's shape whose logits are made by rows of the target's own head, and whose features
are divided by their root mean square before they are fused. The file's metadata say after which layers they are taken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from phonograph.engine.models.config import SHAPES

NAMES = {
    "fc": "fc.weight",
    "n_emb": "midlayer.input_layernorm.weight",
    "n_hid": "midlayer.hidden_norm.weight",
    "n_post": "midlayer.post_attention_layernorm.weight",
    "n_out": "norm.weight",
    **{name: f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def convert(source: Path, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    with safe_open(source, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in (*NAMES, "draft_ids")}
        after = [int(number) for number in file.metadata()["feature_layers_after"].split(",")]
    target, ids = SHAPES["smollm2-135m"], found.pop("draft_ids").long()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab,
        "draft_vocab_size": len(ids),
        "max_position_embeddings": target.max_len,
        "rope_theta": target.rope_theta,
        "rms_norm_eps": target.rms_eps,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": after,
            "norms_features": True,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    named = {NAMES[name]: tensor for name, tensor in found.items()}
    save_file({**named, "d2t": ids - torch.arange(len(ids))}, folder / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    convert(arguments.source, arguments.folder)
