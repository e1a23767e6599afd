"""OtherArguments: arguments of a graphed function that are not slots, and hooks: a recording has them frozen in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phonograph.devices import Device
from phonograph.errors import CaptureError, Frame
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.inputs.snapshots import snapshots_without
from phonograph.graphs.phases.decisions import Reason, RunEagerly, ShapeKey
from phonograph.graphs.phases.live_arguments import Live
from phonograph.graphs.phases.phase import Admission, SampleFunction, sample_from
from phonograph.graphs.recording.modules import ModuleCall


class OtherArguments:
    """Arguments, and fields of arguments, that are not slots: a recording has their values frozen in, so a call with
    other values runs eagerly.

    Only those named `live`, which a recording can't read, may change.
    """

    def __init__(
        self, signature: inspect.Signature, slots: Sequence[Slot], live: Sequence[Live], function: Callable[..., Any]
    ) -> None:
        self._line = _defined_at(function)
        self._left_out = {slot.path for slot in slots} | {one.path for one in live}
        self._whole = {path[0] for path in self._left_out if len(path) == 1}
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        given = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
        self._defaults = snapshots_without(given, self._left_out)
        self.carried: Callable[[], Callable[[ShapeKey], Mapping[str, Any]] | None] = lambda: None
        """A weak reference to the runner's method: the runner holds this."""

    def admit(self, batch: dict[str, Any], key: ShapeKey) -> RunEagerly | None:
        """Refuse a replay that would not see an argument."""
        carried_by = self.carried()
        if carried_by is None:
            return None
        carried = carried_by(key)
        if not carried and batch.keys() <= self._whole:
            return None  # nothing but defaults, then and now
        given = self._defaults | snapshots_without(batch, self._left_out)
        recorded = {**self._defaults, **carried}
        for name in given.keys() | recorded.keys():
            if name not in given or name not in recorded or given[name] != recorded[name]:
                detail = f"the argument {name!r} differs from what {key} was captured with{self._line}. Make it a slot"
                return RunEagerly(Reason.FEATURE_NOT_CAPTURED, detail)
        return None


def _defined_at(function: Callable[..., Any]) -> str:
    """The line where a function's arguments are declared, in brackets; nothing for what has none."""
    inner = inspect.unwrap(getattr(function, "forward", function))
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    return f" ({Frame(code.co_filename, code.co_firstlineno, code.co_name)})" if code is not None else ""


def unchanged_hooks(call: ModuleCall) -> Admission:
    """Refuses replays once a hook of the module has come or gone."""

    def admit(batch: Any, key: ShapeKey) -> RunEagerly | None:
        if not call.hooks_changed:
            return None
        detail = f"a hook was registered or removed after {key} was captured. Call capture() again"
        return RunEagerly(Reason.FEATURE_NOT_CAPTURED, detail)

    return admit


def sample_of_slots(signature: inspect.Signature, slots: Sequence[Slot], device: Device, name: str) -> SampleFunction:
    """Samples of the slots alone; refused where the function needs more than that."""
    given = {slot.path[0] for slot in slots}
    needed = [
        one for one in signature.parameters.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    missing = next((one.name for one in needed if one.name not in given), None)
    if missing is None:
        return sample_from(slots, device.torch_device)

    def refuse(extent: Extent, seed: int) -> Any:
        raise CaptureError(
            f"the argument {missing!r} of {name}{signature} is no slot and has no default, so there is no value to "
            "record with",
            "Make it a slot, give it a default, or pass sample=, a function that gives all arguments",
        )

    return refuse
