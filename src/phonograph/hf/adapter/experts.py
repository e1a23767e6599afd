"""Experts of adapted models: routing that reads nothing on the host, or a break where transformers has none."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from phonograph.graphs.phases.breaks import graph_break

GROUPED, BATCHED = "grouped_mm", "batched_mm"


def can_choose(model: Any) -> bool:
    """Whether a model has experts, and a choice of ways to them."""
    return bool(getattr(model, "_can_set_experts_implementation", lambda: False)())


def implementation(dtype: torch.dtype, device: torch.device) -> str:
    """What transformers calls the routing to ask for. Grouped products are made for bfloat16 on a GPU; batched ones
    gather the weights of every token's experts."""
    return GROUPED if dtype == torch.bfloat16 and device.type == "cuda" else BATCHED


def reading_module(model: Any, error: BaseException) -> str | None:
    """The innermost module with experts that was running when a value was read; None for any other error.

    The run is over tensors without storage, which say so when their values are asked for.
    """
    if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
        return None
    at_work = list[Any]()
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            at_work.append(owner)
        trace = trace.tb_next
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    for module in reversed(at_work):
        name = names.get(id(module), "")
        if any(word in name.rpartition(".")[2] for word in ("expert", "moe", "ffn", "mlp", "feed_forward")):
            return name
    return None


def break_at(model: Any, name: str) -> None:
    """Run this module between two graphs. What it returns is shaped as its first argument."""
    module = model.get_submodule(name)
    module.forward = graph_break(module.forward, fake=_like_first)


def _like_first(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(hidden)
