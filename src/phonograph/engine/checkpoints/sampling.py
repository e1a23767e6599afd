"""Sampling that a model's publishers recommend: defaults for what a request leaves open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from phonograph.engine.models.fields import Fields
from phonograph.engine.request import NEUTRAL, SamplingParams
from phonograph.errors import RequestError

log = logging.getLogger("phonograph")

_HF_WITHOUT_EFFECT = (
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "pad_token_id",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
)
"""How long an answer may be is the caller's to say; the rest is no sampling, or read elsewhere."""
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def from_hf(fields: Fields) -> SamplingParams:
    """From a generation_config.json; what can't be is left out with a warning that names it."""
    found = {name: fields.values[name] for name in NEUTRAL if name in fields}
    if found.get("top_k") == -1:
        found["top_k"] = 0  # off, as many files write it
    if fields.values.get("do_sample") is False:
        found["temperature"] = 0.0
    elif not isinstance(fields.values.get("do_sample"), bool | None):
        _warn(fields, f"do_sample is {fields.values['do_sample']!r}, not true or false. It is ignored")
    unknown = {name: value for name, value in fields.values.items() if name not in NEUTRAL}
    _warn_of_others(fields, {name: value for name, value in unknown.items() if name not in _HF_WITHOUT_EFFECT})
    return _checked(fields, found)


def from_gguf(metadata: Mapping[str, object], source: str) -> SamplingParams:
    """From the `general.sampling.*` metadata of a GGUF file."""
    fields = Fields(source, metadata).below("general.sampling.")
    found = {_GGUF_NAMES[name]: value for name, value in fields.values.items() if name in _GGUF_NAMES}
    for name in ("temperature", "top_k"):
        value = found.get(name)
        if isinstance(value, int | float) and value < 0:
            found[name] = 0  # llama.cpp takes everything below 0 for 0
    _warn_of_others(fields, {name: value for name, value in fields.values.items() if name not in _GGUF_NAMES})
    return _checked(fields, found)


def described(sampling: SamplingParams) -> str:
    """What holds where a request says nothing, in words."""
    said = [f"{name} {getattr(sampling, name):g}" for name in NEUTRAL if getattr(sampling, name) is not None]
    if not said:
        return f"sampling: neutral where a request says nothing (temperature {NEUTRAL['temperature']:g})"
    return f"sampling: {', '.join(said)} where a request says nothing, from the model; --sampling neutral turns it off"


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


def _warn_of_others(fields: Fields, others: Mapping[str, object]) -> None:
    if names := [name for name, value in others.items() if value not in (None, False, 0, 1, "", [], {})]:
        _warn(fields, f"not supported, and without effect: {', '.join(sorted(names))}")


def _warn(fields: Fields, problem: str) -> None:
    log.warning("%s: %s", fields.source, problem)
