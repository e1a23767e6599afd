"""Python state: values that trial runs change, the line that changed them, and how they are restored."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from phonograph.devices.trace import is_outside, is_users
from phonograph.errors import CaptureError, Frame
from phonograph.graphs.recording.places import same
from phonograph.graphs.recording.reachable import Snapshot, StateChange, is_importing

_PACKAGES = (sysconfig.get_paths()["purelib"] + "/", sysconfig.get_paths()["platlib"] + "/")


class PythonState:
    """The Python values that a body can reach, as they should be.

    The objects that the roots hold are known from the start; the globals of a function are added when it is first
    called, before it can have changed them.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = list(roots)
        self._codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self.now = self.taken()

    def taken(self) -> Snapshot:
        """A snapshot of this moment."""
        snapshot = Snapshot()
        snapshot.reach(self._roots)
        for code, namespace in self._codes.values():
            snapshot.reach_globals(code, namespace)
        return snapshot

    def reach(self, roots: Sequence[Any]) -> None:
        """Add what can be reached from these, as it is now."""
        self._roots += roots
        self.now.reach(roots)
        self.refuse_what_cant_be_undone()

    def refuse_what_cant_be_undone(self) -> None:
        """Raise if the body reaches an iterator or a lazy module: advancing or initializing one can't be undone."""
        if self.now.lazy:
            raise CaptureError(
                f"{self.now.lazy[0]} has no shape yet, and the first call makes it for good",
                "Call the function once with a real batch before capture()",
            )
        if self.now.iterators:
            raise CaptureError(
                f"the body reaches the iterator {self.now.iterators[0]}, whose position trial runs would move for good",
                "Take its values outside of the body, and pass them in a slot",
            )

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Add the globals of all functions that are called in here for the first time. It slows every call, so each
        shape has it once."""
        before = sys.getprofile()
        if before is None:
            sys.setprofile(self._on_call)
        try:
            yield
        finally:
            if before is None:
                sys.setprofile(None)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put back all that is changed in here."""
        try:
            yield
        finally:
            self.now.restore()

    def _on_call(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self._codes or not self._is_looked_into(code, frame.f_globals):
            return
        self._codes[id(code)] = code, frame.f_globals
        self.now.reach_globals(code, frame.f_globals)
        self.refuse_what_cant_be_undone()

    def _is_looked_into(self, code: CodeType, namespace: dict[str, Any]) -> bool:
        """Whether a function may have to do with the body: not if it is the library's, or of a package that no object
        of the body comes from."""
        file = code.co_filename
        if file.startswith(_PACKAGES):
            package = str(namespace.get("__name__", "")).partition(".")[0]
            return package in self.now.packages and is_users(file) and not is_importing(namespace)
        return is_users(file) and not is_importing(namespace)


class Moves:
    """Separates what a body changes from what is changed outside of it: before it, and in gaps, which replays run."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._last: dict[tuple[int, type, Any], Any] = {}
        self.by_body: dict[tuple[int, type, Any], StateChange] = {}
        self.elsewhere: dict[tuple[int, type, Any], StateChange] = {}

    def note(self, moves: dict[tuple[int, type, Any], StateChange]) -> None:
        """Whatever changed since the last note belongs to `moves`."""
        changes = {_identity(change): change for change in self._snapshot.changes()}
        for identity, change in changes.items():
            if identity not in self._last or not same(self._last[identity], change.now):
                moves[identity] = change
        self._last = {identity: change.now for identity, change in changes.items()}

    @contextmanager
    def around_gap(self) -> Iterator[None]:
        self.note(self.by_body)
        try:
            yield
        finally:
            self.note(self.elsewhere)


def _identity(change: StateChange) -> tuple[int, type, Any]:
    return id(change.place.holder), type(change.place), change.key


def _callers_line(frame: FrameType, outside: FrameType) -> Frame:
    """The innermost line outside of the standard library: a package's own line says the most about its state."""
    found = frame
    above: FrameType | None = frame
    while above is not None and above is not outside:
        file = above.f_code.co_filename
        if is_users(file):
            found = above
            break
        above = above.f_back
    return Frame(found.f_code.co_filename, found.f_lineno, found.f_code.co_name)


def line_of(change: StateChange, run: Callable[[], object]) -> Frame | None:
    """The line that makes a change, found by a traced run; None while a debugger traces.

    Where the standard library makes it, that is the line that calls it.
    """
    if sys.gettrace() is not None:
        return None
    outside = sys._getframe()
    last, found = change.place.get(change.key), list[Frame]()
    line: Frame | None = None

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal line
        if found or not is_outside(frame.f_code.co_filename):
            return None
        if line is not None and not same(last, change.place.get(change.key)):
            found.append(line)
            return None
        if event != "return":
            line = _callers_line(frame, outside)
        return trace

    sys.settrace(trace)
    try:
        run()
    except Exception:
        pass  # the change is what is asked for
    finally:
        sys.settrace(None)
    return found[0] if found else None
