"""ModelConfig: a dense decoder's numbers, on which its layers, its KV cache and its checkpoint agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn, Self

import torch

from phonograph.engine.json_fields import Fields
from phonograph.engine.models import features, rope_scaling
from phonograph.engine.models.rope_scaling import RopeScaling
from phonograph.errors import CheckpointError
from phonograph.numbers import is_whole

log = logging.getLogger("phonograph")

_LARGEST = {
    "num_layers": 10_000,
    "hidden": 2**20,
    "intermediate": 2**24,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "vocab": 2**26,
    "max_len": 2**31 - 1,
}
"""Far above any model: a damaged number is refused before something of that size is made."""

_KEYS = {
    "num_layers": "num_hidden_layers or block_count",
    "hidden": "hidden_size or embedding_length",
    "intermediate": "intermediate_size or feed_forward_length",
    "num_heads": "num_attention_heads or attention.head_count",
    "num_kv_heads": "num_key_value_heads or attention.head_count_kv",
    "head_dim": "head_dim or attention.key_length",
    "vocab": "vocab_size",
    "max_len": "max_position_embeddings or context_length",
    "rope_theta": "rope_theta or rope.freq_base",
    "rms_eps": "rms_norm_eps or attention.layer_norm_rms_epsilon",
    "rope_attention_factor": "attention_factor",
}
"""What a config.json or GGUF metadata call them."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model of the dense family; another family adds its fields in a subclass."""

    architecture: str
    """The class name in `transformers`."""
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    """The longest sequence, prompt and output together, that the positions are meant for."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tied_embeddings: bool = False
    """The output matrix is the embedding, and no `lm_head.weight` is stored."""
    qk_norm: bool = False
    """Queries and keys are normed per head before they are rotated (Qwen3)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: frozenset[int] = frozenset()
    """The layers that the window is for."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    """The precision that the weights were published in: a hint, not a demand."""

    def __post_init__(self) -> None:
        for name, most in _LARGEST.items():
            if not 1 <= getattr(self, name) <= most:
                self._refuse_value(name, f"at least 1 and at most {most:,}")
        if self.num_heads % self.num_kv_heads:
            self._refuse(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            self._refuse(f"head_dim is {self.head_dim}; rotation needs an even one")
        if self.sliding_layers and self.sliding_window is None:
            self._refuse("some layers have a sliding window, but sliding_window has no value")
        for name in ("rope_theta", "rms_eps", "rope_attention_factor"):
            if not 0 < getattr(self, name) < math.inf:
                self._refuse_value(name, "a finite number above 0")
        self._check_frequencies()

    def _check_frequencies(self) -> None:
        """Whatever the scaling and its numbers: each pair of a head's dims has a frequency, and it is finite."""
        found = f"rope_theta {self.rope_theta} with {self.rope_scaling}"
        try:
            frequencies = self.inv_freq()
        except (ArithmeticError, ValueError, RuntimeError) as error:
            self._refuse(f"{found} gives no rotary frequencies ({error})")
        if frequencies.shape != (self.head_dim // 2,):
            self._refuse(f"{found} gives frequencies of shape {list(frequencies.shape)} for heads of {self.head_dim}")
        if not bool((frequencies.isfinite() & (frequencies >= 0)).all()):
            self._refuse(f"{found} gives rotary frequencies that are negative or not finite")

    def _refuse_value(self, name: str, expected: str) -> NoReturn:
        self._refuse(f"{name} is {getattr(self, name)} (in files: {_KEYS[name]}); expected {expected}")

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"configuring {self.architecture}: {problem}. Correct the checkpoint's configuration.")

    def window(self, layer: int) -> int | None:
        """How many of the latest tokens a layer attends to, itself included; None for all."""
        return self.sliding_window if layer in self.sliding_layers else None

    def inv_freq(self) -> torch.Tensor:
        """The rotary frequencies, stretched as the model wants them."""
        if self.rope_scaling is None:
            return rope_scaling.plain_inv_freq(self.rope_theta, self.head_dim)
        return self.rope_scaling.inv_freq(self.rope_theta, self.head_dim)  # [head_dim // 2]

    @property
    def rope_attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.attention_factor

    @classmethod
    def from_hf(cls, fields: Fields, architecture: str, *, also_read: Collection[str] = ()) -> Self:
        """From the content of a Hugging Face config.json; `also_read` are fields that a family reads besides."""
        num_layers, num_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
        hidden, max_len = fields.integer("hidden_size"), fields.integer("max_position_embeddings")
        rope = rope_scaling.hf_section(fields)
        window, sliding_layers = _hf_window(fields, architecture, min(num_layers, _LARGEST["num_layers"]))
        is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        head_dim = fields.integer("head_dim", 128 if is_qwen3 else hidden // max(num_heads, 1))
        features.check_hf(fields, head_dim, also_read)
        may_have_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        attention_bias = may_have_bias and fields.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden=hidden,
            intermediate=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab=fields.integer("vocab_size"),
            max_len=max_len,
            rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
            rope_scaling=rope_scaling.from_hf(rope, fields),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            qk_norm=is_qwen3,
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
            sliding_window=window,
            sliding_layers=sliding_layers,
            bos_id=fields.integer("bos_token_id") if "bos_token_id" in fields else None,
            eos_ids=known_ids(fields, "eos_token_id", fields.integer("vocab_size")),
            dtype=_DTYPES.get(fields.text("dtype", fields.text("torch_dtype", "")), torch.bfloat16),
        )

    @classmethod
    def from_gguf(cls, everything: Fields, architecture: str, tensor_names: Collection[str]) -> Self:
        """From the metadata of a GGUF file; its tensor names tell what the metadata leave out."""
        name = everything.text("general.architecture")
        fields, tokens = everything.below(f"{name}."), everything.below("tokenizer.ggml.")
        hidden, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
        head_dim = fields.integer("attention.key_length", hidden // max(num_heads, 1))
        max_len = fields.integer("context_length")
        features.check_gguf(fields, head_dim, max_len)
        vocab = fields.integer("vocab_size", len(tokens.texts("tokens")))
        ends = [known_ids(tokens, f"{kind}_token_id", vocab) for kind in ("eos", "eot", "eom")]
        return cls(
            architecture=architecture,
            num_layers=fields.integer("block_count"),
            hidden=hidden,
            intermediate=fields.integer("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab=vocab,
            max_len=max_len,
            rope_theta=fields.number("rope.freq_base", 10_000.0),
            rope_scaling=rope_scaling.from_gguf(fields.below("rope.scaling."), max_len),
            rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tied_embeddings="output.weight" not in tensor_names,
            qk_norm=name == "qwen3",
            qkv_bias="blk.0.attn_q.bias" in tensor_names,
            o_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            bos_id=tokens.integer("bos_token_id") if "bos_token_id" in tokens else None,
            eos_ids=tuple(dict.fromkeys(end for ids in ends for end in ids)),
        )


def known_ids(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    """The token ids in a field; ids that the vocabulary doesn't have are reported and left out."""
    ids = fields.integers(name)
    if outside := [token for token in ids if not 0 <= token < vocab]:
        log.warning("%s: %s has %d, which a vocabulary of %d does not have", fields.source, name, outside[0], vocab)
    return tuple(token for token in ids if 0 <= token < vocab)


def _hf_window(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """The sliding window and the layers that it is for."""
    _refuse_unknown_windows(fields, architecture)
    if architecture == "LlamaForCausalLM":
        return None, frozenset()
    if architecture == "MistralForCausalLM":
        # Where the field is absent the window is 4096; only an explicit null turns it off.
        window = fields.values.get("sliding_window", 4096)
    else:
        window = fields.values.get("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    if window is None:
        return None, frozenset()
    if not is_whole(window, 1, _LARGEST["max_len"]):
        expected = "a positive integer of 32 bits, or null"
        raise CheckpointError(
            f"reading {fields.source}: sliding_window is {window!r}; expected {expected}. Correct it."
        )
    kinds = fields.texts("layer_types") if "layer_types" in fields else None
    if kinds is None:
        first = 0 if architecture == "MistralForCausalLM" else fields.integer("max_window_layers", 28)
        return window, frozenset(range(first, num_layers))
    if len(kinds) != num_layers or (strange := set(kinds) - {"full_attention", "sliding_attention"}):
        found = f"{len(kinds)} entries" if len(kinds) != num_layers else repr(sorted(strange)[0])
        expected = f"{num_layers} entries of full_attention or sliding_attention"
        raise CheckpointError(f"reading {fields.source}: layer_types has {found}; expected {expected}. Correct it.")
    sliding = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if architecture == "MistralForCausalLM" and len(sliding) < num_layers:
        # transformers gives every layer of a Mistral the window, whatever layer_types says.
        raise CheckpointError(
            f"reading {fields.source}: layer_types gives a window to {len(sliding)} of {num_layers} layers; expected "
            "all of a Mistral's, or none with sliding_window null. Correct one of them."
        )
    return window, sliding


def _refuse_unknown_windows(fields: Fields, architecture: str) -> None:
    """Refuse what no layer of an architecture computes, and transformers' cache acts on all the same.

    A window of the whole context bounds nothing.
    """
    is_llama = architecture == "LlamaForCausalLM"
    kinds = fields.texts("layer_types")
    known = {"full_attention"} if is_llama else {"full_attention", "sliding_attention"}
    problems = [f"layer_types has {kind!r}" for kind in kinds if kind not in known]
    names = ["attention_chunk_size"]
    if is_llama and not kinds and fields.flag("use_sliding_window", True):
        names.append("sliding_window")
    for name in names:
        if name in fields and fields.integer(name) < fields.integer("max_position_embeddings"):
            problems.append(f"{name} is {fields.integer(name)}")
    if problems:
        raise CheckpointError(
            f"reading {fields.source}: {problems[0]}, which the layers of a {architecture} do not compute. Remove it "
            "if the model was trained without; else use an engine that supports it: the outputs would be wrong."
        )


SHAPES = {
    "qwen3-8b": ModelConfig(
        "Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 128, 151_936, 40_960,
        rope_theta=1e6, qk_norm=True, bos_id=151_643, eos_ids=(151_645, 151_643),
    ),
    "qwen3-0.6b": ModelConfig(
        "Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960,
        rope_theta=1e6, qk_norm=True, tied_embeddings=True, bos_id=151_643, eos_ids=(151_645, 151_643),
    ),
    "qwen3-32b": ModelConfig(
        "Qwen3ForCausalLM", 64, 5120, 25_600, 64, 8, 128, 151_936, 40_960,
        rope_theta=1e6, qk_norm=True, bos_id=151_643, eos_ids=(151_645, 151_643),
    ),
    "llama3-8b": ModelConfig(
        "LlamaForCausalLM", 32, 4096, 14_336, 32, 8, 128, 128_256, 8192,
        rope_theta=5e5, rms_eps=1e-5, bos_id=128_000, eos_ids=(128_001, 128_009),
    ),
    "smollm2-135m": ModelConfig(
        "LlamaForCausalLM", 30, 576, 1536, 9, 3, 64, 49_152, 8192,
        rope_theta=1e5, rms_eps=1e-5, tied_embeddings=True, bos_id=1, eos_ids=(2,),
    ),
    "tiny": ModelConfig(
        "LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 256, 512, bos_id=1, eos_ids=(2,), dtype=torch.float32
    ),
}  # fmt: skip
"""Models by shape alone, for benchmarks and tests without a checkpoint."""
