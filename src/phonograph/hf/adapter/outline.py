"""Outline: what a model of transformers keeps and computes in each layer, found without its weights.

The model is made of tensors without storage, and a forward pass over a few tokens shows which layers call attention,
with what. So what can't be served is refused before weights are read.
"""

from __future__ import annotations

import copy
import difflib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.engine.cache.groups import Paged
from phonograph.errors import DeclarationError
from phonograph.hf.adapter import attention, batch_looks, experts
from phonograph.hf.adapter.attention import Bending, StepPlace
from phonograph.hf.adapter.head import head_of, logits_of
from phonograph.hf.adapter.sentences import NATIVE, first_line, path_of, raised, refused

_NUM_TOKENS = 5
_SERVED = frozenset({"full_attention", "sliding_attention"})
_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "mamba", "moe"})
"""Types of layers that keep a state of one size, or nothing."""
_HARMLESS = frozenset({"position_ids", "cache_position"})
"""Tensors that some models hand to attention, and that say what a step says."""
_REPORTS = {
    "output_router_logits": False,
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
}
"""What a configuration may ask a forward pass to return, and what it is here; no logit depends on it."""
_NAME_IT = "Name it: --hf-layers model.language_model, say."


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer, as it was called."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def kept(self) -> Paged:
        """Pages have one width; the narrower of keys and values is filled up."""
        return Paged(self.num_kv_heads, max(self.key_dim, self.value_dim))


@dataclass(frozen=True)
class Outline:
    """What is known of a model before its weights are read."""

    architecture: str
    """The class that transformers makes."""
    decoder: str
    """The name of the module that has the layers."""
    layers: tuple[LayerAttention, ...]
    hidden: int
    vocab: int
    limits: tuple[tuple[int, str], ...] = ()
    """Lengths up to which the model is computed rightly, with the reason of each."""
    breaks: tuple[str, ...] = ()
    """Modules that route to experts by values that the host reads."""
    routes: bool = False
    """Whether it has experts, with a way to them that can be chosen."""
    hands_down: bool = True
    """Whether keyword arguments of a forward pass reach attention."""

    @property
    def windows(self) -> frozenset[int]:
        return frozenset(layer.window for layer in self.layers if layer.window is not None)

    def described(self) -> str:
        """How its layers differ from plain attention."""
        found = [f"window {window:,}" for window in sorted(self.windows)]
        found += [f"softcap {cap:g}" for cap in sorted({one.softcap for one in self.layers if one.softcap})]
        found += ["sinks"] if any(layer.has_sinks for layer in self.layers) else []
        found += ["keys and values of different widths"] if any(x.key_dim != x.value_dim for x in self.layers) else []
        return f"{len(self.layers)} attention layers in {self.decoder}" + "".join(f", {one}" for one in found)

    def refuse_beyond(self, source: str, max_len: int) -> None:
        """Refuse sequences that are longer than the model is computed rightly for."""
        for longest, reason in self.limits:
            if max_len > longest:
                raise refused(
                    source, f"{reason}, and sequences may have {max_len:,} tokens", f"Give --max-len {longest}."
                )


@dataclass
class _Watching:
    """Stands for a step; notes what layers call it with."""

    source: str
    calls: list[tuple[int, LayerAttention]] = field(default_factory=list)

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bending: Bending, others: dict[str, Any]
    ) -> torch.Tensor:
        name, layer = type(module).__name__, getattr(module, "layer_idx", None)
        for key, value in others.items():
            if isinstance(value, torch.Tensor) and key not in _HARMLESS:
                problem = f"{name} hands {key!r} to attention, a tensor that ours does not know"
                raise refused(self.source, problem, NATIVE)
        if others.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise refused(self.source, f"{name} looks at tokens after its own", NATIVE)
        if not isinstance(layer, int) or q.shape[0] != 1 or k.shape[2] != q.shape[2]:
            problem = f"{name} calls attention with {list(q.shape)} queries and {list(k.shape)} keys, layer {layer}"
            raise refused(self.source, problem, NATIVE)
        sinks = bending.sinks
        if sinks is not None and sinks.shape != (q.shape[1],):
            raise refused(self.source, f"{name} has sinks of shape {list(sinks.shape)}, not one a head", NATIVE)
        found = LayerAttention(
            *(q.shape[1], k.shape[1], k.shape[3], v.shape[3]),
            *(bending.window, bending.softcap, sinks is not None),
        )
        self.calls.append((layer, found))
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def outline_of(config: Any, source: str, *, trust_remote_code: bool = False, decoder: str | None = None) -> Outline:
    """What a configuration of transformers makes; refuses what would be computed wrongly or can't be run.

    `decoder` names the module that has the layers, where the model itself is not to be asked.
    """
    attention.register()
    try:
        inner = config.get_text_config()
    except ValueError as error:
        raise refused(source, "its configuration has several models of text", NATIVE) from error
    limits = _limits_of(inner, source)
    model = _bare(config, source, trust_remote_code=trust_remote_code)
    limits += batch_looks.leave_out(model)
    decoder, breaks, place = decoder_of(model, source, decoder), list[str](), None
    while True:
        watching = _Watching(source)
        try:
            states, logits = _run(model, decoder, watching, place)
            break
        except DeclarationError:  # the step did not arrive
            if place is not None:
                raise
            place = attention.StepPlace()
            place.give_to(model)
        except Exception as error:
            name = experts.reading_module(model, error)
            if name is None or name in breaks:
                raise raised(source, model, error, "without a mask or a cache of its own", NATIVE) from error
            breaks.append(name)
            _stub(model, name)
    layers = _counted(watching.calls, inner.num_hidden_layers, source, model)
    return Outline(
        *(type(model).__name__, decoder, layers, states.shape[-1], logits.shape[-1]),
        *(tuple(limits), tuple(breaks), experts.can_choose(model), place is None),
    )


def without_reports(config: Any) -> Any:
    """The configuration of the same model, which returns its states in an object and nothing besides."""
    try:
        inner = config.get_text_config()
    except ValueError:  # several; said when the model is outlined
        inner = config
    for one in (config, inner):
        for name, value in _REPORTS.items():
            if hasattr(one, name):
                setattr(one, name, value)
    return config


def _limits_of(config: Any, source: str) -> tuple[tuple[int, str], ...]:
    """Refuse layers by their type; lengths that others are right up to."""
    kinds, chunk = list(getattr(config, "layer_types", None) or ()), getattr(config, "attention_chunk_size", None)
    served = _SERVED if chunk is None else _SERVED | {"chunked_attention"}
    strange = Counter(kind for kind in kinds if kind not in served)
    if strange:
        kind, count = strange.most_common(1)[0]
        why = "which keep no keys and values" if kind in _WITHOUT_KEYS else "an attention that ours does not compute"
        raise refused(source, f"{count} of its {len(kinds)} layers are {kind!r}, {why}", NATIVE)
    if chunk is None:
        return ()
    return ((int(chunk), f"its layers attend in chunks of {chunk:,} tokens, and ours know none"),)


def _bare(config: Any, source: str, *, trust_remote_code: bool) -> Any:
    """The model, of tensors without storage."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # it is written to
                attn_implementation=attention.NAME,
                experts_implementation=experts.BATCHED,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
            ).eval()
    except Exception as error:
        if isinstance(error, KeyError) and attention.NAME in error.args:  # a table of classes by their attention
            problem = "its attention can't be chosen: it is no part of the attention interface"
            raise refused(source, problem, NATIVE) from error
        raise refused(source, f"it can't be made as a causal language model ({first_line(error)})", NATIVE) from error


def decoder_of(model: Any, source: str, named: str | None = None) -> str:
    """The name of the module that has the layers: as given, what the model says, or who owns the list of them."""
    if named is not None:
        known = [name for name, _ in model.named_modules() if name]
        if named not in known:
            near = difflib.get_close_matches(named, known, 1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise refused(source, f"{type(model).__name__} has no module {named!r}{hint}", "Correct --hf-layers.")
        return named
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    if found is None or found is model or _goes_to_logits(found):
        count = model.config.get_text_config().num_hidden_layers
        lists = [
            name for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count
        ]
        found = model.get_submodule(lists[0].rpartition(".")[0]) if lists else None
    name = path_of(found, model) if found is not None else None
    if not name:
        raise refused(source, f"{type(model).__name__} does not say which of its modules has the layers", _NAME_IT)
    return name


def _goes_to_logits(module: Any) -> bool:
    """Whether what a model calls its decoder has a head, or is one: a last matrix."""
    return not hasattr(module, "get_output_embeddings") or module.get_output_embeddings() is not None


@torch.no_grad()
def _run(model: Any, decoder: str, watching: _Watching, place: StepPlace | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of a few tokens."""
    with torch.device("meta"):
        ids, positions = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64), torch.arange(_NUM_TOKENS)[None]
        states = attention.run(model.get_submodule(decoder), watching, place, input_ids=ids, position_ids=positions)
        return states, logits_of(head_of(model, decoder), states[0])


def _counted(
    calls: list[tuple[int, LayerAttention]], num_layers: int, source: str, model: Any
) -> tuple[LayerAttention, ...]:
    """The layers in their order; each must have attended once."""
    counts, name = Counter(layer for layer, _ in calls), type(model).__name__
    if counts and hasattr(model.config, "decoder_layers") and len(counts) != num_layers:
        problem = f"{name} is the decoder of an encoder-decoder: it attends in {len(counts)} layers, and the"
        raise refused(source, f"{problem} {num_layers} of its configuration are the encoder's", "Use a decoder alone.")
    if beyond := len(counts.keys() - set(range(num_layers))):
        problem = f"{name} attends in {len(counts)} layers, {beyond} more than the {num_layers} of its configuration"
        raise refused(source, problem, NATIVE)
    if missing := num_layers - len(counts):
        problem = f"{missing} of the {num_layers} layers of {name} do not attend through the attention interface"
        raise refused(source, problem, NATIVE)
    if (most := max(counts.values())) > 1:
        raise refused(source, f"a layer of {name} attends {most} times", NATIVE)
    return tuple(layer for _, layer in sorted(calls, key=lambda call: call[0]))


def _stub(model: Any, name: str) -> None:
    """What a break gives, in its place."""
    model.get_submodule(name).forward = lambda hidden, *args, **kwargs: torch.empty_like(hidden)
