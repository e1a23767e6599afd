"""Families that transformers' layers serve, or why they are refused: the table of docs/models.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf
from tokenizers import decoders, models, pre_tokenizers

from phonograph.engine.models.features import NotComputedError
from phonograph.engine.models.registry import ARCHITECTURES, config_from_hf

VOCAB, WINDOW = 80, 6
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN_SIZES = {
    **_IDS,
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = {**PLAIN_SIZES, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_SLIDING = {**_HEADS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_UNTIED = {**_SLIDING, "tie_word_embeddings": False}
"""Embeddings that are scaled up, and tied to the head, make a model repeat its last token."""
_GPT = {**_IDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "n_positions": 128}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_GRANITE = {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
_DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LINEAR = {f"linear_{what}": 2 for what in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5],
    "long_factor": [3.0, 4.0],
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@dataclass(frozen=True)
class Family:
    """A kind of model."""

    config: Callable[[], Any]
    has: str = ""
    """What is not plain in it."""
    refusal: str = ""
    """What the refusal says, where it is not served."""
    max_len: int = 40


SERVED = {
    "Llama": Family(lambda: hf.LlamaConfig(**_HEADS)),
    "Qwen2": Family(lambda: hf.Qwen2Config(**_GROUPED), "biases of queries, keys and values"),
    "Qwen3": Family(lambda: hf.Qwen3Config(**_HEADS), "norms of queries and keys"),
    "Mistral": Family(lambda: hf.MistralConfig(**_HEADS, sliding_window=WINDOW), "window"),
    "Gemma 2": Family(
        lambda: hf.Gemma2Config(**_UNTIED, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        "window, soft caps of scores and logits, own scale",
    ),
    "Gemma 3": Family(lambda: hf.Gemma3TextConfig(**_UNTIED), "window, two rotary frequencies, own scale"),
    "gpt-oss": Family(
        lambda: hf.GptOssConfig(**_SLIDING, num_local_experts=4, num_experts_per_tok=2), "window, sinks, experts"
    ),
    "Phi-3": Family(lambda: hf.Phi3Config(**_GROUPED), "fused projections"),
    "OLMo 2": Family(lambda: hf.Olmo2Config(**_GROUPED), "norms after layers"),
    "GPT-2": Family(lambda: hf.GPT2Config(**_GPT), "learned positions, layer norms"),
    "Granite": Family(lambda: hf.GraniteConfig(**_GROUPED, **_GRANITE), "multipliers, scaled logits"),
    "SmolLM3": Family(lambda: hf.SmolLM3Config(**_GROUPED, no_rope_layer_interval=2), "layers without positions"),
    "Cohere 2": Family(
        lambda: hf.Cohere2Config(**_SLIDING, logit_scale=0.25), "window, parallel layers, scaled logits"
    ),
    "Qwen3-MoE": Family(lambda: hf.Qwen3MoeConfig(**_HEADS, **_ROUTED), "experts"),
    "Mixtral": Family(lambda: hf.MixtralConfig(**_HEADS, num_local_experts=4), "experts"),
    "DeepSeek-V3": Family(
        lambda: hf.DeepseekV3Config(
            **{**PLAIN_SIZES, "num_key_value_heads": 4},
            **_MLA,
            **_DEEPSEEK,
            moe_intermediate_size=8,
            first_k_dense_replace=1,
        ),
        "latent attention (keys and values of different widths), experts, shared experts",
    ),
}
"""Tokens equal those of plain transformers in every backend and phase."""

ALSO_SERVED = {
    "Qwen2, windowed": Family(
        lambda: hf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        "window",
    ),
    "Phi": Family(lambda: hf.PhiConfig(**PLAIN_SIZES), "part of a head is rotated"),
    "GPT-NeoX": Family(lambda: hf.GPTNeoXConfig(**PLAIN_SIZES), "parallel layers"),
    "OPT": Family(
        lambda: hf.OPTConfig(
            **{**PLAIN_SIZES, "pad_token_id": 1}, ffn_dim=24, word_embed_proj_dim=16, do_layer_norm_before=True
        ),
        "learned positions",
    ),
    "ModernBERT, decoder": Family(
        lambda: hf.ModernBertDecoderConfig(
            **{**PLAIN_SIZES, "num_hidden_layers": 4}, cls_token_id=1, sep_token_id=2, local_attention=2 * WINDOW
        ),
        "window, two rotary frequencies, a head of several layers",
    ),
    "BERT, decoder": Family(
        lambda: hf.BertConfig(**PLAIN_SIZES, is_decoder=True), "learned positions, a head of several layers"
    ),
    "StarCoder2": Family(lambda: hf.Starcoder2Config(**_GROUPED)),
    "StableLM": Family(lambda: hf.StableLmConfig(**{**_GROUPED, "hidden_size": 32})),
    "GLM-4": Family(lambda: hf.Glm4Config(**_HEADS)),
    "Nemotron": Family(lambda: hf.NemotronConfig(**_GROUPED)),
    "Cohere": Family(lambda: hf.CohereConfig(**_GROUPED), "scaled logits"),
    "OLMoE": Family(lambda: hf.OlmoeConfig(**_GROUPED, num_experts=4, num_experts_per_tok=2), "experts"),
    "GraniteMoE": Family(
        lambda: hf.GraniteMoeConfig(**_GROUPED, **_GRANITE, num_local_experts=4, num_experts_per_tok=2), "experts"
    ),
    "Qwen2-MoE": Family(
        lambda: hf.Qwen2MoeConfig(**_GROUPED, **_ROUTED, shared_expert_intermediate_size=8), "experts, a shared expert"
    ),
    "ERNIE 4.5 MoE": Family(
        lambda: hf.Ernie4_5_MoeConfig(
            **_GROUPED,
            moe_intermediate_size=8,
            moe_num_experts=4,
            moe_k=2,
            moe_layer_start_index=0,
            moe_layer_end_index=1,
        ),
        "experts, shared experts",
    ),
    "Gemma 3n": Family(
        lambda: hf.Gemma3nTextConfig(
            **{**_SLIDING, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
            altup_num_inputs=2,
        ),
        "window, layers that share the keys and values of others",
    ),
    "Gemma 4": Family(
        lambda: hf.Gemma4TextConfig(
            **{**_SLIDING, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            global_head_dim=16,
        ),
        "window, heads of two widths, layers that share the keys and values of others",
    ),
    "Gemma 3, with images": Family(
        lambda: hf.Gemma3Config(
            text_config=hf.Gemma3TextConfig(**_SLIDING).to_dict(),
            vision_config=_VISION,
            mm_tokens_per_image=4,
            boi_token_index=3,
            eoi_token_index=4,
            image_token_index=5,
        ),
        "window; served for texts",
    ),
    "DBRX": Family(
        lambda: hf.DbrxConfig(
            d_model=16,
            n_heads=4,
            n_layers=2,
            max_seq_len=128,
            vocab_size=VOCAB,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
        ),
        "experts, which run between two graphs",
    ),
    "Llama 4, within its chunk": Family(
        lambda: hf.Llama4TextConfig(
            **_HEADS, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=40, rope_scaling=None
        ),
        "chunks, experts; up to the length of a chunk",
    ),
    "Phi-3, long rope, within its first context": Family(
        lambda: hf.Phi3Config(**{**_GROUPED, "original_max_position_embeddings": 40}, rope_parameters=_LONG),
        "long rope, with the factor of short sequences",
    ),
    "Llama, dynamic rope": Family(lambda: hf.LlamaConfig(**_HEADS, rope_parameters=_DYNAMIC), "dynamic rope"),
}
"""Tokens equal those of plain transformers, eagerly."""

REFUSED = {
    "Mamba": Family(
        lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4),
        refusal="layers are 'linear_attention'",
    ),
    "Qwen3-Next": Family(
        lambda: hf.Qwen3NextConfig(
            **{**_HEADS, "num_hidden_layers": 4}, **_ROUTED, **_LINEAR, shared_expert_intermediate_size=8
        ),
        refusal="3 of its 4 layers are 'linear_attention'",
    ),
    "Bloom": Family(
        lambda: hf.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCAB),
        refusal="2 of the 2 layers of BloomForCausalLM do not attend through the attention interface",
    ),
    "Llama 4, beyond its chunk": Family(
        lambda: hf.Llama4TextConfig(**_HEADS, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=8),
        refusal="its layers attend in chunks of 8 tokens",
    ),
    "Phi-3, long rope, beyond its first context": Family(
        lambda: hf.Phi3Config(**{**_GROUPED, "original_max_position_embeddings": 16}, rope_parameters=_LONG),
        refusal="beyond 16 tokens its rotary frequencies follow the longest of a batch",
    ),
    "Llama 4, beyond its query scale": Family(
        lambda: hf.Llama4TextConfig(
            **_HEADS, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=40, floor_scale=16
        ),
        refusal="beyond 15 tokens it scales queries by their place in a batch",
    ),
    "Falcon": Family(
        lambda: hf.FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB),
        refusal="its attention can't be chosen",
    ),
    "GPT-J": Family(lambda: hf.GPTJConfig(**_GPT, rotary_dim=4), refusal="its attention can't be chosen"),
    "MPT": Family(
        lambda: hf.MptConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=VOCAB, max_seq_len=128),
        refusal="MptForCausalLM raises",
    ),
}
"""Refused before weights are read."""


@torch.no_grad()
def made(family: Family, seed: int = 0, std: float = 0.3) -> Any:
    """A model of a family, with weights so large that a wrong position, mask or expert shows."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "bias" in name or "sinks" in name:
            parameter.normal_(std=std)
    return model.eval()


def saved(model: Any, folder: Path) -> Path:
    """The folder of a model, with a tokenizer of single bytes."""
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i + 3 for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What plain transformers generates, whatever ends a text."""
    ids = torch.tensor([prompt])
    options = hf.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    mask = torch.ones_like(ids)
    tokens: list[int] = model.generate(ids, attention_mask=mask, generation_config=options)[0, len(prompt) :].tolist()
    return tokens


PAGE = Path(__file__).parent.parent / "docs" / "models.md"
_BEGIN, _END = "<!-- families -->\n", "<!-- end -->\n"


def table() -> str:
    """The families of docs/models.md."""
    lines = [
        "| family | layers | tested | what is not plain in it, or why it is refused |",
        "| --- | --- | --- | --- |",
    ]
    for families, tested in ((SERVED, "every backend and phase"), (ALSO_SERVED, "eagerly")):
        for name, family in families.items():
            lines.append(f"| {name} | {layers_of(family)} | {tested} | {family.has} |")
    for name, family in REFUSED.items():
        lines.append(f"| {name} | refused | by its sentence | “{family.refusal} …” |")
    return "\n".join(lines) + "\n"


def layers_of(family: Family) -> str:
    """Whose layers a family can have."""
    values = family.config().to_dict()
    if values["model_type"] not in {entry.model_type for entry in ARCHITECTURES.values()}:
        return "adapter"
    try:
        config_from_hf(values)
    except NotComputedError:
        return "adapter"
    return "native, or adapter"


def page() -> str:
    """docs/models.md with the table of now."""
    before, rest = PAGE.read_text().split(_BEGIN)
    return f"{before}{_BEGIN}{table()}{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
