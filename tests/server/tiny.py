"""A tiny model with a tokenizer of bytes and a chat template, as a folder: text routes that cost nothing."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.registry import config_from_hf

SPECIAL = ("<|start|>", "<|end|>")
VOCAB = 256 + len(SPECIAL)
CONTEXT = 512

TEMPLATE = """\
{%- if tools %}<|start|>tools {{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages %}<|start|>{{ message.role }} {{ message.content or '' }}
{%- if message.tool_calls %} calls {{ message.tool_calls[0].function.arguments | tojson }}{% endif -%}
<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|start|>assistant {% endif -%}
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": VOCAB - 1,
    "dtype": "float32",
}


def write(folder: Path, context: int = CONTEXT) -> Path:
    """Write config, weights, tokenizer and template."""
    folder.mkdir()
    config = {**CONFIG, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = RandomCheckpoint(config_from_hf(config))
    save_file({name: tensor.to(torch.float32) for name, tensor in checkpoint.tensors()}, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[1]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
