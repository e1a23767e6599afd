"""Replacements: methods of one model object in the place of those that it had, taken back without harm to others'."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

_ANSWERED = ("__func__", "__name__", "__qualname__", "__self__", "__wrapped__")


class Replacement:
    """A method in the place of one of a model; to whoever looks at it, the one that it replaced.

    Others may put a wrapper of their own over it, and call it after it was taken back: then it is the method that it
    replaced. A deep copy of the model has a copy of it, which calls the copy; a shallow one has none (`CopiedState`).
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


class CopiedState(dict[str, Any]):
    """The attributes of a model, for a copy of it.

    A shallow copy would share a replacement, which runs the model that it was made for: it gets what was there before.
    A deep or a pickled copy gets copies of the replacements.
    """

    def __init__(self, state: dict[str, Any], model: Any) -> None:
        super().__init__(state)
        self.whole = state
        for name, value in state.items():
            while isinstance(value, Replacement) and value.model is model:
                value = value.before  # noqa: PLW2901
            if value is not None or state[name] is None:
                self[name] = value
            else:
                del self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.whole, memo)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (self.whole,)


def replacements_of(model: Any, names: tuple[str, ...]) -> list[Replacement]:
    """Those that are installed on a model, of methods with these names."""
    found = (vars(model).get(name) for name in names)
    return [one for one in found if isinstance(one, Replacement) and one.is_installed]
