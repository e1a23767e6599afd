"""Replacements: methods of one model object in the place of those that it had, taken back without harm to others'."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_ANSWERED = ("__func__", "__name__", "__qualname__", "__self__", "__wrapped__")


class Replacement:
    """A method in the place of one of a model; to whoever looks at it, the one that it replaced.

    Others may put a wrapper of their own over it, and call it after it was taken back: then it is the method that it
    replaced. A copy of the model has a copy of it, which calls the copy.
    """

    def __init__(self, model: Any, name: str, serve: Callable[..., Any]) -> None:
        self.model, self.name, self.serve = model, name, serve
        self.before: Any = vars(model).get(name)
        """What the model had in its place; None for the method of its class."""
        self.is_installed = False
        self.__doc__ = self.plain.__doc__

    @property
    def plain(self) -> Callable[..., Any]:
        """The method that was there."""
        if self.before is None:
            return getattr(type(self.model), self.name).__get__(self.model)  # type: ignore[no-any-return]
        return self.before  # type: ignore[no-any-return]

    @property
    def is_outermost(self) -> bool:
        """Whether nobody has put another in its place."""
        return vars(self.model).get(self.name) is self

    def install(self) -> None:
        setattr(self.model, self.name, self)
        self.is_installed = True

    def remove(self) -> None:
        if self.is_outermost:
            delattr(self.model, self.name)
            if self.before is not None:
                setattr(self.model, self.name, self.before)
        self.is_installed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.serve if self.is_installed else self.plain)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    def __getattr__(self, name: str) -> Any:
        if name not in _ANSWERED:
            raise AttributeError(f"a replaced method has no attribute {name!r}")
        return getattr(self.plain, name)


def replacements_of(model: Any, names: tuple[str, ...]) -> list[Replacement]:
    """Those that are installed on a model, of methods with these names."""
    found = (vars(model).get(name) for name in names)
    return [one for one in found if isinstance(one, Replacement) and one.is_installed]
