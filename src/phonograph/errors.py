"""Exceptions: the tree of errors that phonograph raises.

PhonographError
├── DeclarationError      a slot, dim, pool or phase is declared in a way that can't work
├── CheckpointError       a checkpoint can't be loaded as it is
├── LoadError             a batch doesn't fit the slots of its phase
├── DeviceError           a device is unknown, missing, or can't do what is asked
├── CaptureError          a recording could not be made
│   ├── HostReadError             the host reads a device value
│   ├── DataDependentShapeError   a shape depends on device values
│   ├── HostConstantError         a host value would be frozen into the graph
│   └── InputWriteError           the body writes its input in place
├── OutputError           a forward pass returns something that can't be copied for its caller
├── BreakError            a gap's outputs don't fit what the next graph reads
├── PlanError             the configuration is invalid, or asks for something that is not possible
├── CoverageError         strict mode: a batch has no graph
├── StepOrderError        a step is launched or collected twice or out of order
├── RequestError          a request that can't be served as it is
├── UnavailableError      the engine accepts no requests right now
├── CoreError             the process of the engine core could not be started, or died
└── VerifyError           a replay differs from the eager path
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

UnavailableReason = Literal["queue_full", "draining", "down"]


class PhonographError(Exception):
    """The root of the tree."""


class DeclarationError(PhonographError, ValueError):
    """A slot, dim, pool or phase is declared in a way that can't work."""


class CheckpointError(PhonographError, ValueError):
    """A checkpoint can't be loaded as it is."""


class LoadError(PhonographError, ValueError):
    """A batch doesn't fit the slots of its phase."""


class DeviceError(PhonographError, RuntimeError):
    """A device is unknown, missing, or can't do what is asked."""


class OutputError(PhonographError, TypeError):
    """A forward pass returns what can't be copied for its caller; says where, what, and what to return instead."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}. {remedy}.")


class BreakError(PhonographError, RuntimeError):
    """A gap's outputs don't fit what the next graph reads."""


class PlanError(PhonographError, ValueError):
    """The configuration is invalid, or asks for something that is not possible."""


class CoverageError(PhonographError, RuntimeError):
    """Strict mode: a batch has no graph."""

    def __init__(self, problem: str, *, reason: str = "") -> None:
        self.reason = reason
        """Why a step would be eager, as it is counted; empty for what is found before the first call."""
        super().__init__(problem)


class StepOrderError(PhonographError, RuntimeError):
    """A step is launched or collected twice or out of order."""


class RequestError(PhonographError, ValueError):
    """A request that can't be served as it is; names the field at fault where one is."""

    def __init__(self, problem: str, *, field: str | None = None) -> None:
        self.field = field
        super().__init__(problem)


class UnavailableError(PhonographError, RuntimeError):
    """The engine accepts no requests right now; says why, and after how many seconds to retry."""

    def __init__(self, problem: str, reason: UnavailableReason, retry_after: float) -> None:
        self.reason = reason
        self.retry_after = retry_after
        super().__init__(problem)


class CoreError(PhonographError, RuntimeError):
    """The process of the engine core could not be started, or died with all that it served."""


class VerifyError(PhonographError, AssertionError):
    """A replay differs from the eager path."""


@dataclass(frozen=True)
class Frame:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}, in {self.function}"


class CaptureError(PhonographError, RuntimeError):
    """A recording could not be made; says what was captured, which op, which line, and the remedy."""

    def __init__(self, problem: str, remedy: str, *, op: str = "", frame: Frame | None = None, shape: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        self.op = op
        self.frame = frame
        self.shape = shape
        super().__init__(problem)

    def __str__(self) -> str:
        doing = f"capturing {self.shape}: " if self.shape else ""
        where = f" ({self.frame})" if self.frame else ""
        return f"{doing}{self.problem}{where}. {self.remedy}"


class HostReadError(CaptureError):
    """The host reads a device value while a graph is recorded."""


class DataDependentShapeError(CaptureError):
    """A shape depends on device values."""


class HostConstantError(CaptureError):
    """A host value would be frozen into the graph."""


class InputWriteError(CaptureError):
    """The body writes its input in place, which would not reach the caller's tensor."""


@contextmanager
def allocating(what: str, remedy: str) -> Iterator[None]:
    """A block that only allocates: an out-of-memory error says for what, and what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # torch's exception depends on the size
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DeviceError(f"allocating {what}: {why}. {remedy}") from error
