"""Pooling: how hidden states of a prompt become the one vector that a request wants of it."""

from __future__ import annotations

from typing import Literal, get_args

from phonograph.errors import RequestError
from phonograph.numbers import shown

Pooling = Literal["mean", "last"]
"""Of a prompt's hidden states after the last norm: the mean of all, or that of its last token."""


def check_pooling(found: object) -> None:
    """Refuse what is no kind of pooling."""
    if found not in get_args(Pooling):
        known = " or ".join(map(repr, get_args(Pooling)))
        raise RequestError(f"pooling is {known}, found {shown(found)}.", field="pooling")
