"""accelerate on Hugging Face families: tokens and logits of `generate` are those of transformers over the same cache,
or the reason why they are not replays is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from hugging_face import DECODERS, LONGROPE, VOCAB, WINDOW, Family, made, prompt
from phonograph.hf import accelerate

DROPPED = "the model has replaced the cache"
"""Phi-3 begins its cache anew where positions become long."""
REFUSED = {
    "phi3, longrope": (LONGROPE or DROPPED, DROPPED),
    "llama, dynamic rope": ("dynamic_frequency_update",),
    "falcon": ("would freeze a host constant",),
    "mpt": ("use_cache is False",),
}
"""What is said of families that no graph holds."""
_DEEPSEEK = {
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
FAMILIES = DECODERS | {
    "deepseek_v3": Family(
        lambda: transformers.DeepseekV3Config(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            vocab_size=VOCAB,
            max_position_embeddings=128,
            **_DEEPSEEK,
        )
    ),
}
FAST = {"llama", "gemma3", "gpt2"}
"""The others run with the slow tests."""


def generated(model: Any, length: int, *, padded: bool, seed: int, **options: Any) -> Any:
    """Two sequences and their logits; with `padded`, the first prompt is shorter."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, : length // 2] = 0 if padded else 1
    found = model.generate(
        prompt(2, length, seed), attention_mask=mask, max_new_tokens=2 * WINDOW, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW + 3])
@pytest.mark.parametrize(
    "name", [one if one in FAST else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_a_generation_has_the_bits_of_transformers(name: str, length: int) -> None:
    """Before, when and after a window is crossed, with padded prompts and without, over a cache that is used again."""
    model, plain = made(FAMILIES[name]), made(FAMILIES[name])
    max_len = max(min(256, getattr(model.config, "max_position_embeddings", 256)), length + 2 * WINDOW - 1)
    fast = accelerate(model)
    for seed in (0, 1):
        for padded in (False, True):
            declined = fast.declined.total()
            found = generated(model, length, padded=padded, seed=seed)
            is_served = fast.declined.total() == declined
            cache: Any = {"past_key_values": transformers.StaticCache(plain.config, max_len)} if is_served else {}
            wanted = generated(plain, length, padded=padded, seed=seed, **cache)
            assert torch.equal(found[0], wanted[0]), fast.explain()
            assert torch.equal(found[1], wanted[1]), fast.explain()
    if name in REFUSED:
        assert fast.replays == 0 or (name == "phi3, longrope" and not LONGROPE)
        assert any(said in reason for said in REFUSED[name] for reason in [*fast.eager_steps, *fast.declined])
    else:
        assert fast.replays >= 4 * (2 * WINDOW - 1) - 4, fast.explain()
