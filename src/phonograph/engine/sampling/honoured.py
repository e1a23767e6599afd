"""HonouredParameters: the sampling parameters that an engine honours, from the columns of its request tables."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

from phonograph.engine.requests.parameter import Sampling, SamplingParameter
from phonograph.engine.requests.request import NEUTRAL, READ_BY_ENGINE, Request, SamplingParams
from phonograph.engine.state.column import Column
from phonograph.errors import DeclarationError, RequestError


class HonouredParameters:
    """Parameters that a column carries are honoured; those that nothing reads can't be set."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self._declared: dict[str, SamplingParameter] = {}
        for column in columns:
            found = column.parameter
            if found is not None and self._declared.setdefault(found.name, found) != found:
                raise DeclarationError(
                    f"column {column.name!r} and another declare the parameter {found.name!r} differently. Share one."
                )
        self._others: dict[type[SamplingParams], list[tuple[str, object]]] = {}
        """By class of parameters, the fields that nobody reads, with the value that changes nothing."""

    def level_of(self, params: SamplingParams) -> Sampling:
        """How much a request needs of the sampler."""
        return max([one.needs(params) for one in self._declared.values()], default=Sampling.GREEDY)

    def refuse_others(self, request: Request) -> None:
        """Refuse a request that sets what this engine would ignore."""
        params = request.params
        for name, harmless in self._unread(type(params)):
            value = getattr(params, name)
            if value is not None and value != harmless:
                problem = f"{name} is {reprlib.repr(value)}, and this engine's sampler does not honour it"
                remedy = "Leave it out" if harmless is None else f"Leave it out, or set {harmless!r}"
                raise RequestError(f"request {request.id}: {problem}. {remedy}.", field=name)

    def _unread(self, kind: type[SamplingParams]) -> list[tuple[str, object]]:
        if kind not in self._others:
            read = READ_BY_ENGINE | self._declared.keys()
            self._others[kind] = [(one.name, _harmless(one)) for one in fields(kind) if one.name not in read]
        return self._others[kind]


def _harmless(unread: Field[Any]) -> object:
    """The value of a field at which it does not matter that nobody reads it."""
    if unread.name == "temperature":
        return 0.0  # without a temperature, sampling is greedy
    if unread.name in NEUTRAL:
        return NEUTRAL[unread.name]
    if unread.default_factory is not MISSING:
        return unread.default_factory()
    return None if unread.default is MISSING else unread.default
