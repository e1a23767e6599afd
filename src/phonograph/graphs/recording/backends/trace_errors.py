"""Trace errors: what torch.compile says of a body that it can't trace, as an error with the user's line."""

from __future__ import annotations

import re

from phonograph.devices.trace import is_users
from phonograph.errors import CaptureError, Frame

_REMEDY = (
    "Change that line, mark the function that it is in @graph_break(fake=…), or use backend='breakable', which traces "
    "nothing"
)

_PASSED = re.compile(r"convert args/kwargs to proxy[^#]*?UserDefinedObjectVariable\((\w+)\)", re.DOTALL)
_READ = (
    "Read it inside of the break: a live argument as current().batch['name'], another object by self; or use "
    "backend='breakable', which passes it on"
)


def as_capture_error(error: BaseException) -> CaptureError:
    """What the tracer raised, with the line of the user's code; an error of ours is found below it."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, CaptureError):
            below.frame = below.frame or _frame_of(error)
            return below
        below = below.__cause__ or below.__context__
    passed = _PASSED.search(str(error))
    if passed is not None:
        what = "live argument" if passed[1] == "LiveArgument" else passed[1]
        return CaptureError(
            f"a {what} is passed to a break, and no traced graph holds it", _READ, frame=_frame_of(error)
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    problem = (kept or lines or [type(error).__name__])[0].rstrip(".")
    return CaptureError(f"torch.compile can't trace this: {problem}", _REMEDY, frame=_frame_of(error))


def _frame_of(error: BaseException) -> Frame | None:
    """The innermost line of the user's in what was traced."""
    stack = getattr(error, "real_stack", None) or ()
    frames = [Frame(one.filename, one.lineno or 0, one.name) for one in stack]
    users = [frame for frame in frames if is_users(frame.file)]
    return users[-1] if users else frames[-1] if frames else None
