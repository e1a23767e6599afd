"""Admission of generations: why a call of `generate` is not accelerated."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from phonograph.hf.generation_cache import CACHE, unsupported_layer

PREPARE = "prepare_inputs_for_generation"
_SERVED_MODES = ("greedy_search", "sample")
_SERVED_CACHES = (None, "static", "hybrid", "hybrid_chunked", "sliding_window")
"""All but the first are names of one kind, a static cache; older checkpoints have the last ones."""
_SERVED_ATTENTION = ("sdpa", "eager")


def otherwise_asked(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call of `generate` is not one to serve, by what it alone is told; None if it may be."""
    try:
        given = inspect.signature(model.generate).bind_partial(*args, **kwargs).arguments
    except TypeError:
        given = {}  # generate itself says what is wrong with it
    given = {**given.get("kwargs", {}), **given}
    criteria = given.get("stopping_criteria") or ()
    checks = {
        "custom_generate has a loop of its own": given.get("custom_generate") is not None,
        "synced_gpus goes on past the last token": bool(given.get("synced_gpus")),
        "a MaxLengthCriteria takes the place of max_new_tokens": any(
            isinstance(one, transformers.MaxLengthCriteria) for one in criteria
        ),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def refusal(model: Any, config: Any, model_kwargs: Mapping[str, Any], mode: Any) -> str | None:
    """Why a generation gets no recordings, or None."""
    wanted = config.cache_implementation
    text = model.config.get_text_config(decoder=True)
    attention = getattr(text, "_attn_implementation", None)
    devices = {str(one) for one in getattr(model, "hf_device_map", {}).values()}
    checks = {
        "the model is in training mode. Call model.eval()": model.training,
        "gradients are asked for": torch.is_grad_enabled(),
        f"{mode.value} is not recorded, greedy_search and sample are": mode.value not in _SERVED_MODES,
        "it drafts for another model": bool(getattr(config, "is_assistant", False)),
        "an encoder-decoder keeps a second cache": model.config.is_encoder_decoder,
        "past_key_values is a cache of the caller": model_kwargs.get(CACHE) is not None,
        "use_cache is False": config.use_cache is False,
        f"cache_implementation={wanted!r} was asked for": wanted not in _SERVED_CACHES,
        "compile_config was given": config.compile_config is not None,
        "output_attentions has a column for every place of a static cache": config.output_attentions
        and config.return_dict_in_generate,
        f"attn_implementation={attention!r} has masks of its own": attention not in _SERVED_ATTENTION,
        "under autocast no static cache is made": torch.is_autocast_enabled(model.device.type),
        "the model is spread over several devices": len(devices) > 1,
        "the model has a decoding loop of its own": type(model)._sample is not transformers.GenerationMixin._sample,
        "the model has a cache of its own kind": not model._supports_default_dynamic_cache(),
        "transformers can't run the model over a static cache": not model._can_compile_fullgraph,
    }
    reason = next((reason for reason, holds in checks.items() if holds), None)
    return reason if reason is not None else unsupported_layer(text)


def prepares_as_usual(model: Any) -> bool:
    """Whether the model prepares the inputs of a step as most do: then that can be recorded."""
    is_usual = getattr(type(model), PREPARE) is getattr(transformers.GenerationMixin, PREPARE)
    return is_usual and PREPARE not in vars(model) and not hasattr(model, "create_masks_for_generate")
