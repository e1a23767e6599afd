"""Loading of adapted models: weights by transformers, then what makes them a model of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phonograph.engine.checkpoints.loading import refuse_not_finite
from phonograph.engine.checkpoints.safetensors import stored_floats, warn_of_adapter, weight_files
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig, known_ids
from phonograph.engine.models.interface import ModelParts
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import Progress
from phonograph.hf.adapter import attention, batch_looks, experts
from phonograph.hf.adapter.fusing import fused
from phonograph.hf.adapter.head import head_of
from phonograph.hf.adapter.model import HfModel
from phonograph.hf.adapter.outline import Outline
from phonograph.hf.adapter.self_check import self_check
from phonograph.hf.adapter.sentences import AGAIN, first_line, passes_on, refused
from phonograph.hf.adapter.twins import Fused

log = logging.getLogger("phonograph")

_UNKNOWN_CONTEXT = 8192
"""Of a model that does not say how long sequences may be."""


def adapted(
    whole: Any, outline: Outline, config: ModelConfig, parts: ModelParts, source: str, progress: Progress
) -> HfModel:
    """A loaded model of transformers as a model of the engine, once its logits were checked."""
    whole.eval().requires_grad_(False)
    weights = {name: one for name, one in whole.named_parameters() if one.is_floating_point()}
    refuse_not_finite(source, weights, {name: one.sum() for name, one in weights.items()})
    batch_looks.leave_out(whole)
    for name in outline.breaks:
        experts.break_at(whole, name)
    decoder, head = whole.get_submodule(outline.decoder), head_of(whole, outline.decoder)
    dtype = next(whole.parameters()).dtype
    place = None if outline.hands_down else attention.StepPlace()
    if place is not None:
        place.give_to(whole)
    ops = fused(decoder, parts.kernels) if parts.hf_ops == "fused" else Fused(decoder, ())
    model = HfModel(
        *(config, outline, whole, decoder, head, parts.attention, parts.kernels, dtype, parts.max_len, place),
        fused=None if ops.layers is decoder else ops.layers,
    )
    progress("checking against eager attention", 0, 1)
    checked = _checked(replace(model, notes=ops.notes), source)
    progress("checking against eager attention", 1, 1)
    return checked


def _checked(model: HfModel, source: str) -> HfModel:
    """With what was found; in transformers' own ops where the check passes with these alone. Refuses it otherwise."""
    try:
        found = self_check(model, source)
    except CheckpointError as error:
        if model.fused is None:
            raise
        fault = str(error)
    else:
        log.info("%s: %s", source, found)
        return replace(model, notes=(str(found), *model.notes))
    log.info("with norms and rotations as one launch each: %s", fault)
    found = self_check(replace(model, fused=None), source)
    told = (
        "norms and rotations in transformers' own ops: as one launch each they passed their trials, and the load "
        "check failed, which passes without; --hf-ops own does without them from the start"
    )
    log.info("%s: %s", source, found)
    log.warning("%s: %s", source, told)
    return replace(model, fused=None, notes=(str(found), told))


def read_weights(folder: Path, config: Any, dtype: torch.dtype, routing: str | None, *, trust_remote_code: bool) -> Any:
    """The model, in memory of the host; refuses weights that are damaged, missing or have another shape."""
    from transformers import AutoModelForCausalLM

    options = {} if routing is None else {"experts_implementation": routing}
    for path in weight_files(folder):
        stored_floats(path)  # refuses a file that is cut short or damaged
    try:
        with quiet():
            whole, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are told, and refused below
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        if passes_on(error):
            raise
        problem = f"its weights can't be loaded ({type(error).__name__}: {first_line(error)})"
        raise refused(str(folder), problem, AGAIN) from error
    _refuse_unlike(str(folder), found)
    if found.get("unexpected_keys"):
        names = sorted(found["unexpected_keys"])
        log.warning("%s: %d tensors are not part of the model and are left out (%s)", folder, len(names), names[0])
    if not getattr(whole, "_hf_peft_config_loaded", False):  # where peft is installed, transformers applies it
        warn_of_adapter(folder)
    return whole


def _refuse_unlike(source: str, found: dict[str, Any]) -> None:
    """Refuse weights that are not those of the configuration, by what transformers tells of them."""
    if unlike := sorted(found.get("mismatched_keys") or ()):
        name, stored, expected = unlike[0]
        more = f"; and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        told = f"{name} has shape {list(stored)}, but the configuration makes it {list(expected)}{more}"
        raise refused(source, told, AGAIN)
    for problem in ("missing_keys", "error_msgs"):
        if found.get(problem):
            first = sorted(map(str, found[problem]))[0]
            raise refused(source, f"{len(found[problem])} {problem.replace('_', ' ')} ({first})", AGAIN)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' bars and warnings, off for as long: we show progress and say what matters ourselves."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    back: Callable[[], None] = theirs.enable_progress_bar if bars else theirs.disable_progress_bar
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        back()


def routing_of(outline: Outline, dtype: torch.dtype, device: torch.device) -> str | None:
    """The way to experts that is asked for; None for a model that has none, or none to choose."""
    return experts.implementation(dtype, device) if outline.routes else None


def described(outline: Outline, routing: str | None) -> str:
    """Which implementation it is, and what was found of the model, for `explain`."""
    import transformers

    said = f"hf: {outline.architecture} of transformers {transformers.__version__}, {outline.described()}"
    if outline.breaks:
        said += f"; experts run between graphs: {', '.join(outline.breaks)}"
    return said if routing is None else f"{said}; experts by {routing}"


def config_of(config: Any, outline: Outline, files: tuple[Fields, ...]) -> ModelConfig:
    """The numbers that the engine wants to know."""
    inner, first = config.get_text_config(), outline.layers[0]
    dtype = getattr(config, "dtype", None)
    ends = [known_ids(fields, "eos_token_id", outline.vocab) for fields in files]
    if inner is not config:  # what a wrapper's text model says is on no file's first level
        own = getattr(inner, "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        ends.append(tuple(token for token in listed if isinstance(token, int) and 0 <= token < outline.vocab))
    start, wide = getattr(inner, "bos_token_id", None), getattr(inner, "intermediate_size", None) or 4 * outline.hidden
    return ModelConfig(
        architecture=outline.architecture,
        num_layers=len(outline.layers),
        hidden=outline.hidden,
        intermediate=max(wide) if isinstance(wide, list | tuple) else wide,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.kept.head_dim,
        vocab=outline.vocab,
        max_len=getattr(inner, "max_position_embeddings", None) or _UNKNOWN_CONTEXT,
        tied_embeddings=bool(getattr(inner, "tie_word_embeddings", False)),
        bos_id=start if isinstance(start, int) else None,
        eos_ids=tuple(dict.fromkeys(one for ids in ends for one in ids)),
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
    )
