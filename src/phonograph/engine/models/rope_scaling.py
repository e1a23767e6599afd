"""RoPE scaling: rotary frequencies stretched to a longer context than the one the model was first trained on."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from phonograph.engine.json_fields import Fields
from phonograph.engine.models.features import NotComputedError
from phonograph.errors import CheckpointError

log = logging.getLogger("phonograph")

SUPPORTED = "default, dynamic (up to the model's own length), linear, llama3, yarn"

_COMMON = frozenset(["rope_type", "type", "rope_theta", "partial_rotary_factor"])
_READ = {
    "default": _COMMON,
    "dynamic": _COMMON | {"factor"},
    "linear": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _COMMON
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
}
"""What each kind of scaling reads; `transformers` ignores the rest too."""


def plain_inv_freq(theta: float, head_dim: int) -> torch.Tensor:
    """The frequencies before any stretching, in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse: torch.Tensor = 1.0 / (theta**exponents)  # [head_dim // 2]
    return inverse


@dataclass(frozen=True)
class LinearRope:
    """Every frequency is divided by one factor."""

    factor: float
    attention_factor: float = 1.0

    def inv_freq(self, theta: float, head_dim: int) -> torch.Tensor:
        return plain_inv_freq(theta, head_dim) / self.factor


@dataclass(frozen=True)
class FactorsRope:
    """Each frequency is divided by its own factor, as GGUF files store it (`rope_freqs.weight`)."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def inv_freq(self, theta: float, head_dim: int) -> torch.Tensor:
        return plain_inv_freq(theta, head_dim) / torch.tensor(self.factors)


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: long waves are divided by a factor, short ones are kept, and those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int
    attention_factor: float = 1.0

    def inv_freq(self, theta: float, head_dim: int) -> torch.Tensor:
        plain = plain_inv_freq(theta, head_dim)
        wavelength = 2 * math.pi / plain
        stretched = torch.where(wavelength > self.original_max_len / self.low_freq_factor, plain / self.factor, plain)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_max_len / wavelength - self.low_freq_factor) / span
        blended = (1 - smooth) * stretched / self.factor + smooth * stretched
        is_between = (wavelength >= self.original_max_len / self.high_freq_factor) & (
            wavelength <= self.original_max_len / self.low_freq_factor
        )
        return torch.where(is_between, blended, stretched)


@dataclass(frozen=True)
class YarnRope:
    """YaRN: divided by a factor where a wave turns rarely, kept where it turns often, with a ramp between."""

    factor: float
    original_max_len: int
    attention_factor: float
    """Multiplies cos and sin."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inv_freq(self, theta: float, head_dim: int) -> torch.Tensor:
        waves = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # [head_dim // 2]
        low, high = self._turning(self.beta_fast, theta, head_dim), self._turning(self.beta_slow, theta, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # a ramp of no width has no slope
        ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        blended: torch.Tensor = 1.0 / (self.factor * waves) * (1 - kept) + 1.0 / waves * kept
        return blended

    def _turning(self, num_turns: float, theta: float, head_dim: int) -> float:
        """The dimension whose wave turns this often within the original length."""
        return head_dim * math.log(self.original_max_len / (num_turns * 2 * math.pi)) / (2 * math.log(theta))


RopeScaling = LinearRope | FactorsRope | Llama3Rope | YarnRope


def hf_section(model: Fields) -> Fields:
    """The section of a config.json that counts: as in `transformers`, all of `rope_scaling` where it says anything."""
    older, newer = model.section("rope_scaling"), model.section("rope_parameters")
    if older.values and newer.values and older.values != newer.values:
        log.warning(
            "%s has rope_scaling and rope_parameters, and they differ: rope_scaling counts, as in transformers. "
            "Remove the one that is wrong.",
            model.source,
        )
    return older if older.values else newer


def from_hf(rope: Fields, model: Fields) -> RopeScaling | None:
    """From the section that `hf_section` finds in a config.json, whose other fields are `model`."""
    if nested := [name for name, value in rope.values.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"reading {rope.source}: {nested[0]} has frequencies of its own; expected one set for all layers. "
            "Use another model."
        )
    if (share := rope.number("partial_rotary_factor", 1.0)) != 1.0:
        raise NotComputedError(rope, f"partial_rotary_factor is {share}; supported is 1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _READ:
        raise NotComputedError(rope, f"rope_type is {kind!r}; supported are {SUPPORTED}")
    if ignored := sorted(name for name in rope.values if name not in _READ[kind] and rope.values[name] is not None):
        log.warning("%s: %s has no effect with rope_type %r", rope.source, ", ".join(ignored), kind)
    max_len = model.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_len)
    original = model.integer("original_max_position_embeddings", original)
    if kind == "default":
        return None
    if kind == "dynamic":
        # It only acts on sequences longer than the model's max_len, which are never admitted.
        rope.number("factor")
        return None
    if kind == "linear":
        return LinearRope(rope.number("factor"))
    if kind == "llama3":
        factors = (rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor"))
        return Llama3Rope(*factors, original_max_len=original)
    factor = rope.number("factor", max_len / max(original, 1))
    return YarnRope(
        factor=factor,
        original_max_len=original,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def from_gguf(rope: Fields, max_len: int) -> RopeScaling | None:
    """From the `<architecture>.rope.scaling.*` metadata of a GGUF file."""
    known = {"type", "factor", "original_context_length", "finetuned"}
    if strange := sorted(name for name in rope.values if name not in known):
        supported = ", ".join(sorted(known))
        raise CheckpointError(
            f"reading {rope.source}: {strange[0]} is not supported; expected are {supported}. Use another file."
        )
    # A factor without a type is linear in llama.cpp, where 0 is none.
    kind = rope.text("type", "linear" if rope.number("factor", 0.0) else "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearRope(rope.number("factor"))
    if kind == "yarn":
        factor = rope.number("factor")
        original = rope.integer("original_context_length", max_len)
        return YarnRope(factor, original, attention_factor=_yarn_attention_factor(rope, factor))
    raise CheckpointError(
        f"reading {rope.source}: type is {kind!r}; supported are none, linear, yarn. Use another file."
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)
