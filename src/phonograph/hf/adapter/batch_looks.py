"""Batch-wide looks: parts of an adapted model that depend on its batch as a whole, disabled where that is correct.

A step has tokens of many sequences, one after the other. A model that looks at the longest of them, or counts places in
the batch, would compute another thing.
"""

from __future__ import annotations

from typing import Any

_FOLLOWING = ("dynamic", "longrope")
"""Types that look at the positions of a batch, on the host, to choose frequencies for all of it."""


def leave_out(model: Any) -> tuple[tuple[int, str], ...]:
    """Left out are a warning about padding, rotary frequencies that follow the longest sequence of a batch, and scales
    of queries that follow places in it.

    Returns up to how many positions the model is computed rightly then, with the reason of each limit.
    """
    scales = set[int]()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "floor_scale"):
            module.attn_temperature_tuning = False  # the scale is 1 before this position
            scales.add(int(module.floor_scale) - 1)
    limits = [(most, f"beyond {most:,} tokens it scales queries by their place in a batch") for most in scales]
    trained = _fix_frequencies(model)
    if trained is not None:
        limits.append((trained, f"beyond {trained:,} tokens its rotary frequencies follow the longest of a batch"))
    return tuple(limits)


def _say_nothing(*args: Any) -> None:
    return None


def _fix_frequencies(model: Any) -> int | None:
    """Keep those that short sequences have.

    Both types leave them alone up to the context that the model was first trained for.
    """
    longest: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        following = {name: kind for name, kind in by_layer.items() if isinstance(kind, str) and _follows(kind)}
        if not following:
            continue
        longest += [_trained_for(module.config, name, kind) for name, kind in following.items()]
        module.rope_type = (
            {name: "default" if name in following else kind for name, kind in by_layer.items()}
            if isinstance(kinds, dict)
            else "default"
        )
    return min(longest) if longest else None


def _follows(kind: str) -> bool:
    return any(name in kind for name in _FOLLOWING)


def _trained_for(config: Any, layer_type: str | None, kind: str) -> int:
    """Positions up to which the frequencies stay as they are."""
    if "dynamic" in kind:
        return int(config.max_position_embeddings)
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    found = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(found or config.max_position_embeddings)
