"""Sentences of the adapter: what it says when it refuses a model, and where a module is."""

from __future__ import annotations

from typing import Any

import torch

from phonograph.errors import CheckpointError, PhonographError

NATIVE = "Use a model whose layers attend through transformers' attention interface."
AGAIN = "The weights and the configuration don't belong together, or files are missing: get the checkpoint again."


def refused(source: str, problem: str, remedy: str) -> CheckpointError:
    """A model that would be wrong, slow beyond use, or can't be loaded through transformers."""
    return CheckpointError(f"serving {source} through transformers: {problem}. {remedy}")


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def passes_on(error: Exception) -> bool:
    """Whether an error says what is wrong already, and nothing about the model: ours, and a lack of memory."""
    return isinstance(error, PhonographError | MemoryError | torch.OutOfMemoryError)


def raised(source: str, model: Any, error: Exception, when: str, remedy: str) -> Exception:
    """The refusal of a model that raises when it is run."""
    if passes_on(error):
        return error
    name = type(model).__name__
    return refused(source, f"{name} raises {type(error).__name__} ({first_line(error)}) {when}", remedy)


def path_of(inner: Any, outer: Any) -> str | None:
    """The name of a module in one that holds it; empty for itself, None where it is not in it."""
    return next((name for name, module in outer.named_modules() if module is inner), None)
