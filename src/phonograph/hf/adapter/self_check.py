"""Self-check: one short ragged batch through our attention and pages, against the model's own eager attention.

What is compared with runs in the model's own modules, none of which has norms of ours.

A layer that never calls attention is counted before weights are read. What no count shows, as a bias that a model adds
to its scores by itself, shows in the logits. The longest sequence is at the last positions that are served, as if all
tokens before it had left a window: a model that looks at the longest position of a batch, or at how many tokens a cache
has seen, differs.

Where logits differ by more than is plainly rounding, each layer is looked at by itself (`layer_check`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.ops.queries import Queries
from phonograph.hf.adapter import attention
from phonograph.hf.adapter.layer_check import LAYER_MOST, LayerCheck, layer_check
from phonograph.hf.adapter.model import HfModel
from phonograph.hf.adapter.sentences import NATIVE, raised, refused
from phonograph.sizes import ceil_div

_LENGTHS = (5, 12, 19)
_STEPS = 4
"""So many tokens are decoded after each prompt."""
_PAGE = 4
_WINDOW = 7
"""What windows are narrowed to, so that a short batch crosses them."""
_MOST = {torch.float32: 2e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
"""Of a token's logits: the root mean square of the difference over their standard deviation."""
_ROUTED = 0.8
"""The share of prompts' tokens, and of decoded ones, that must agree where rounding may send one to another expert."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class SelfCheck:
    """What was found."""

    num_tokens: int
    worst: float
    """Over tokens, the root mean square of the difference of logits over their standard deviation."""
    seconds: float
    has_windows: bool
    by_layer: str = ""
    """What was found of each layer alone, where logits differ by more than is plainly rounding."""

    def __str__(self) -> str:
        window = ", windows crossed" if self.has_windows else ""
        rounding = f" by roundings that grow ({self.by_layer})" if self.by_layer else ""
        return (
            f"checked against the model's own eager attention: {self.num_tokens} tokens of {len(_LENGTHS)} sequences"
            f"{window}, logits differ by {self.worst:.1e} of their spread{rounding}; {self.seconds:.2f} s"
        )


@torch.inference_mode()
def self_check(model: HfModel, source: str) -> SelfCheck:
    """Compare logits and greedy tokens of prompts, and of decode steps after them; refuses a model that differs.

    Windows are narrowed also where attention was told of none: a model may have put them into its mask.
    """
    began = time.perf_counter()
    found = _by_windows(model, lambda: _differences(model, source))
    checks = [part for parts in found for part in parts]
    differences = torch.cat(checks)
    most, count = _MOST[model.dtype], len(differences)
    is_routed = model.outline.routes or bool(model.outline.breaks)
    share = _ROUTED if is_routed and model.dtype != torch.float32 else 1.0
    by_layer = ""
    if any(int((one <= most).sum()) < share * len(one) for one in checks):  # NaN is not below
        bad, worst = int((~(differences <= most)).sum()), differences.max().item()
        told = f"{bad} of {count} tokens", f"by {worst:.2g} of their spread"
        by_layer = _agreement_by_layer(model, source, *told, is_routed=is_routed)
    return SelfCheck(count, differences.max().item(), time.perf_counter() - began, len(found) > 1, by_layer)


def _by_windows(model: HfModel, look: Callable[[], _Found]) -> list[_Found]:
    """What is found as windows are, and narrowed where there are any."""
    found = [look()]
    below = sys.maxsize if model.outline.windows else model.max_len
    with narrowed(model.whole, _WINDOW, below, model.fused) as has_windows:
        if has_windows:
            found.append(look())
    return found


def _agreement_by_layer(model: HfModel, source: str, bad: str, apart: str, *, is_routed: bool) -> str:
    """Whether logits are apart by roundings alone, that grow from layer to layer: how near each layer is by itself.

    In float32 none grow so far, and without experts, which a rounding may choose, none have.
    """
    fault = f"at most {_MOST[model.dtype]:g} is rounding"
    if model.dtype in LAYER_MOST and is_routed:
        found = [one for one in _by_windows(model, lambda: _by_layer(model)) if one is not None]
        faults = [told for one in found if (told := one.fault()) is not None]
        if found and not faults:
            return str(max(found, key=lambda one: one.worst))
        fault += f"; given the same, {faults[0]} of its size" if faults else ""
    raise refused(
        source,
        f"{bad} of a short batch have other logits than with the model's own eager attention ({apart}; {fault})",
        "Its attention, or its positions, are of a kind that ours does not know, or it looks at its batch as a "
        "whole: use another model.",
    )


def _by_layer(model: HfModel) -> LayerCheck | None:
    sequences, skipped = _batch(model)
    return layer_check(
        model,
        *([len(one) - _STEPS for one in sequences], _STEPS),
        eager=lambda: _eager_logits(model, sequences, skipped),
        paged=lambda: _paged_logits(model, sequences, skipped),
    )


def _differences(model: HfModel, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One for each token of prompts, and of what is decoded after them; a token whose greedy successor is another, by
    more than rounding, counts as 1."""
    sequences, skipped = _batch(model)
    try:
        wanted = _eager_logits(model, sequences, skipped)
    except Exception as error:
        last = skipped[-1] + len(sequences[-1]) - 1
        when = f"with its own eager attention, in a short batch whose last position is {last:,}"
        remedy = "Correct its configuration, give a smaller --max-len, or use another model."
        raise raised(source, model.whole, error, when, remedy) from error
    if bad := int((~wanted.isfinite()).sum()):
        dtype = str(model.dtype).removeprefix("torch.")
        told = f"{bad:,} of {wanted.numel():,} logits of a short batch are not finite, with its own eager attention"
        raise refused(source, told, f"Its values are too large for {dtype}, or damaged: try another --dtype.")
    try:
        found = _paged_logits(model, sequences, skipped)
    except Exception as error:
        raise raised(source, model.whole, error, "with our attention, in a short batch", NATIVE) from error
    spread = wanted.std(-1).clamp_min(1e-6)
    apart = (found - wanted).square().mean(-1).sqrt() / spread
    margins = (wanted.amax(-1) - wanted.gather(-1, found.argmax(-1, keepdim=True))[:, 0]) / spread
    # The largest of many logits may differ by several times their root mean square.
    found = torch.where(margins > 8 * _MOST[model.dtype], torch.ones_like(apart), apart)
    num_decoded = _STEPS * len(sequences)
    return found[:-num_decoded], found[-num_decoded:]


def _batch(model: HfModel) -> tuple[list[torch.Tensor], list[int]]:
    """Sequences, and how many positions are before each: the longest is at the last that are served."""
    sequences = _sequences(model)
    last = min(model.max_len, model.config.max_len)
    return sequences, [0, 0, max(0, last - len(sequences[-1]))]


def _sequences(model: HfModel) -> list[torch.Tensor]:
    """Tokens from all over the vocabulary: prompts, and behind each what is decoded."""
    device, stride, vocab = next(model.whole.parameters()).device, 0.6180339887, model.config.vocab
    lengths = [min(length, max(1, model.max_len - _STEPS)) + _STEPS for length in _LENGTHS]
    numbers = (torch.arange(1, sum(lengths) + 1, dtype=torch.float64) * stride % 1 * vocab).long()
    return list(torch.split(numbers.to(device), lengths))


def _paged_logits(model: HfModel, sequences: Sequence[torch.Tensor], skipped: Sequence[int]) -> torch.Tensor:
    """Prompts as one ragged batch, after which each sequence decodes token by token."""
    device, count = sequences[0].device, len(sequences)
    width = ceil_div(max(map(len, sequences)), _PAGE)
    table = torch.zeros(count + 1, width, dtype=torch.int32, device=device)
    table[1:] = torch.arange(1, count * width + 1, dtype=torch.int32, device=device).view(count, width)
    cache = CacheGroup.empty(model.keeps, count * width + 1, _PAGE, dtype=model.dtype, device=device)
    lengths = [len(one) - _STEPS for one in sequences]
    numbered = torch.arange(1, count + 1, device=device)
    rows = numbered.repeat_interleave(torch.tensor(lengths, device=device))
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    prompts = Queries(rows, positions, table, tokens_per_row=None)
    later = torch.tensor([0, *skipped], device=device)
    tokens = torch.cat([one[:-_STEPS] for one in sequences])
    logits = [model.logits(model.states(tokens, prompts, cache, positions + later[rows]))]
    ends = torch.tensor([0, *lengths], device=device)
    for step in range(_STEPS):
        last = torch.zeros(count + 1, dtype=torch.int64, device=device)
        last[1:] = torch.stack([one[length + step] for one, length in zip(sequences, lengths, strict=True)])
        decodes = Queries(numbered, ends + step, table, tokens_per_row=1, by_row=True)
        positions = decodes.token_positions + later[numbered]
        logits.append(model.logits(model.states(last, decodes, cache, positions)))
    return torch.cat(logits).float()


class _LaterCache(DynamicCache):  # type: ignore[misc]
    """Of a sequence whose first tokens are gone, as those before a window are: it begins at a later position."""

    def __init__(self, config: Any, num_skipped: int) -> None:
        super().__init__(config=config)
        self._num_skipped = num_skipped

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(super().get_seq_length(layer_idx)) + self._num_skipped

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset + self._num_skipped


def _eager_logits(model: HfModel, sequences: Sequence[torch.Tensor], skipped: Sequence[int]) -> torch.Tensor:
    """Each sequence by itself, in the order of the paged ones: prompts, then the tokens that were decoded.

    With a cache of its own, as the model is meant to run: some layers share the keys of others there.
    """
    logits = list[list[torch.Tensor]]()
    with _attending_eagerly(model.whole):
        for one, num_skipped in zip(sequences, skipped, strict=True):
            given = {"past_key_values": _LaterCache(model.decoder.config, num_skipped)} if num_skipped else {}
            done = model.whole(input_ids=one[None, :-_STEPS], use_cache=True, **given)
            logits.append([done.logits[0]])
            for token in one[-_STEPS:]:
                done = model.whole(input_ids=token[None, None], past_key_values=done.past_key_values, use_cache=True)
                logits[-1].append(done.logits[0])
    return torch.cat([part for parts in zip(*logits, strict=True) for part in parts]).float()


@contextmanager
def _attending_eagerly(whole: Any) -> Iterator[None]:
    whole.set_attn_implementation("eager")
    try:
        yield
    finally:
        whole.set_attn_implementation(attention.NAME)


@contextmanager
def narrowed(whole: Any, window: int, below: int = sys.maxsize, twin: Any = None) -> Iterator[bool]:
    """Every window of the model, and of a twin of its layers, that is shorter than `below`, narrowed for as long;
    whether there is one."""
    owners = [*whole.modules(), whole.config, whole.config.get_text_config()]
    owners += [] if twin is None else twin.modules()
    owners += [one.config for one in whole.modules() if hasattr(one, "config")]
    found = {id(one): (one, _window_of(one)) for one in owners}
    kept = [(one, value) for one, value in found.values() if value is not None and value < below]
    try:
        for owner, _ in kept:
            owner.sliding_window = window
        yield bool(kept)
    finally:
        for owner, value in kept:
            owner.sliding_window = value


def _window_of(owner: Any) -> int | None:
    try:
        found = getattr(owner, "sliding_window", None)
    except RuntimeError:  # layers have windows of their own, and the config has no single one
        return None
    return found if isinstance(found, int) else None
