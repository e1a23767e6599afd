"""Refused: what watches raise inside a body is kept, since a body may catch it, and would be recorded as it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from phonograph.devices.trace import OpWatch, Refusals, refusal, uncompiled
from phonograph.errors import CaptureError


class Refused:
    """What was refused in one run of a body."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def note(self, error: Exception) -> None:
        """Keep an error that is raised inside of a body; in the place of its cause, which says less."""
        self.errors = [one for one in self.errors if one is not error and one is not error.__cause__] + [error]

    def check(self) -> None:
        """Raise what was refused first, if anything was."""
        if self.errors:
            raise self.errors[0]

    @contextmanager
    def insisted_on(self) -> Iterator[None]:
        """Raise at the end what was refused in here, whatever became of it: nothing, or an error of the body's own."""
        try:
            yield
        except Exception as error:
            if self.errors and error not in self.errors:
                raise self.errors[0] from error
            raise
        self.check()


class RefusingOps(OpWatch):  # type: ignore[no-untyped-call]
    """An `OpWatch` that keeps what it refuses."""

    def __init__(self, on_op: Any, refused: Refused) -> None:
        super().__init__(on_op)
        self._refused = refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except CaptureError as error:
            self._refused.note(error)
            raise


@contextmanager
def refusing(device_type: str, refused: Refused) -> Iterator[None]:
    """Run everything, but raise a named error for what a graph can't hold, and keep it."""

    def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        error = refusal(func, args, kwargs, device_type)
        if error is not None:
            raise error
        return func(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(Refusals(device_type, refused.note))
        stack.enter_context(RefusingOps(run, refused))
        yield
