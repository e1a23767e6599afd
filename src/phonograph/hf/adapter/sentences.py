"""Sentences of the adapter: what it says when it refuses a model, and where a module is."""

from __future__ import annotations

from typing import Any

from phonograph.errors import CheckpointError


def refused(source: str, problem: str, remedy: str) -> CheckpointError:
    """A model that would be wrong, slow beyond use, or can't be loaded through transformers."""
    return CheckpointError(f"serving {source} through transformers: {problem}. {remedy}")


def path_of(inner: Any, outer: Any) -> str | None:
    """The name of a module in one that holds it; empty for itself, None where it is not in it."""
    return next((name for name, module in outer.named_modules() if module is inner), None)
