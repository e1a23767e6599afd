"""Generation config: sampling values that a model's publishers recommend, for what a request leaves open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from phonograph.engine.json_fields import Fields
from phonograph.engine.requests.request import NEUTRAL, SamplingParams
from phonograph.errors import RequestError

log = logging.getLogger("phonograph")

_HF_WITHOUT_EFFECT = frozenset(
    [
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "eos_token_id",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "renormalize_logits",
        "return_dict_in_generate",
        "return_legacy_cache",
        "speculation_type",
        "target_lookbehind",
        "transformers_version",
        "trust_remote_code",
        "use_cache",
        "use_model_defaults",
        "use_mtp",
    ]
)
"""Ignored fields: the output length is up to the request; the rest is about beam search, or read elsewhere."""
_HF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "force_words_ids": ([],),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "typical_p": (1,),
}
"""By field, the value without effect, `transformers`' default. For any other field that is null."""
_GGUF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "penalty_last_n": (-1,),
    "xtc_probability": (0,),
}
"""Penalties consider the whole text here, which is llama.cpp's -1; its 0 would turn them off."""
_GGUF_WITHOUT_EFFECT = ("mirostat_eta", "mirostat_tau", "xtc_threshold")
"""Parameters of features that another field turns on."""
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def from_hf(fields: Fields) -> SamplingParams:
    """From a generation_config.json; invalid values are left out with a warning that names them."""
    found = {name: fields.values[name] for name in NEUTRAL if name in fields}
    if found.get("top_k") == -1:
        found["top_k"] = 0  # off, as many files write it
    if fields.values.get("do_sample") is False:
        found["temperature"] = 0.0
    elif not isinstance(fields.values.get("do_sample"), bool | None):
        _warn(fields, f"do_sample is {fields.values['do_sample']!r}, not true or false. It is ignored")
    unknown = {name: value for name, value in fields.values.items() if name not in NEUTRAL}
    others = {name: value for name, value in unknown.items() if name not in _HF_WITHOUT_EFFECT}
    _warn_of_others(fields, others, _HF_NEUTRAL)
    return _checked(fields, found)


def from_gguf(metadata: Mapping[str, object], source: str) -> SamplingParams:
    """From the `general.sampling.*` metadata of a GGUF file."""
    fields = Fields(source, metadata).below("general.sampling.")
    found = {_GGUF_NAMES[name]: value for name, value in fields.values.items() if name in _GGUF_NAMES}
    for name in ("temperature", "top_k"):
        value = found.get(name)
        if isinstance(value, int | float) and value < 0:
            found[name] = 0  # llama.cpp takes everything below 0 for 0
    known = (*_GGUF_NAMES, *_GGUF_WITHOUT_EFFECT)
    others = {name: value for name, value in fields.values.items() if name not in known}
    _warn_of_others(fields, others, _GGUF_NEUTRAL)
    return _checked(fields, found)


def described(sampling: SamplingParams) -> str:
    """The defaults for requests that leave a value out, in words."""
    said = [f"{name} {getattr(sampling, name):g}" for name in NEUTRAL if getattr(sampling, name) is not None]
    if not said:
        return f"sampling: neutral where a request leaves a value out (temperature {NEUTRAL['temperature']:g})"
    return f"sampling: {', '.join(said)} where a request leaves it out, from the model; --sampling neutral turns it off"


def _checked(fields: Fields, found: Mapping[str, Any]) -> SamplingParams:
    right: dict[str, Any] = {}
    for name, value in found.items():
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            _warn(fields, f"{error} It is ignored")
        else:
            right[name] = value
    return SamplingParams(**right)


def _warn_of_others(fields: Fields, others: Mapping[str, object], neutral: Mapping[str, tuple[object, ...]]) -> None:
    if names := [name for name, value in others.items() if not _is_neutral(value, neutral.get(name, ()))]:
        _warn(fields, f"not supported, and without effect: {', '.join(sorted(names))}")


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """To Python True is 1 and False is 0; in these files they are not."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _warn(fields: Fields, problem: str) -> None:
    log.warning("%s: %s", fields.source, problem)
