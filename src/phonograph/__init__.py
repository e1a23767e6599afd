"""phonograph: records a forward pass once as a device graph, replays it, and always knows that the replay is right."""

from importlib import import_module
from typing import TYPE_CHECKING

from phonograph.devices import Device, EmulatedDevice, open_device
from phonograph.errors import (
    BreakError,
    CaptureError,
    CheckpointError,
    CoreError,
    CoverageError,
    DataDependentShapeError,
    DeclarationError,
    DeviceError,
    HostConstantError,
    HostReadError,
    InputWriteError,
    LoadError,
    OutputError,
    PhonographError,
    PlanError,
    RequestError,
    StepOrderError,
    UnavailableError,
    VerifyError,
)
from phonograph.graphs.graphed import Graphed, graphed
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.phases.axes import Axis
from phonograph.graphs.phases.breaks import break_graph, graph_break
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.phases.context import Stage, current
from phonograph.graphs.phases.decisions import Reason, Replay, RunEagerly, ShapeKey
from phonograph.graphs.phases.phase import Phase, Sample
from phonograph.graphs.planning.resolve import PhasePlan, Plan, resolve
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.running.runner import Runner, RunnerOptions
from phonograph.graphs.trust.verify import VerifyReport, verify

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.options import EngineOptions
    from phonograph.engine.requests.request import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Axis",
    "BreakError",
    "Buckets",
    "BufferPool",
    "CaptureError",
    "CaptureReport",
    "CheckpointError",
    "CoreError",
    "CoverageError",
    "DataDependentShapeError",
    "DeclarationError",
    "Device",
    "DeviceError",
    "Dim",
    "EmulatedDevice",
    "EngineOptions",
    "Extent",
    "Graphed",
    "HostConstantError",
    "HostReadError",
    "InputWriteError",
    "LoadError",
    "LoadMode",
    "OutputError",
    "Pad",
    "Phase",
    "PhasePlan",
    "PhonographError",
    "Plan",
    "PlanError",
    "Reason",
    "Registry",
    "Replay",
    "RequestError",
    "RunEagerly",
    "Runner",
    "RunnerOptions",
    "Sample",
    "SamplingParams",
    "ShapeKey",
    "Slot",
    "Stage",
    "StepOrderError",
    "UnavailableError",
    "VerifyError",
    "VerifyReport",
    "break_graph",
    "current",
    "graph_break",
    "graphed",
    "open_device",
    "resolve",
    "verify",
]

_ENGINE = {
    "LLM": "phonograph.engine.llm",
    "EngineOptions": "phonograph.engine.options",
    "SamplingParams": "phonograph.engine.requests.request",
}


def __getattr__(name: str) -> object:
    """The engine is imported when it is first named: the graph layer alone needs only torch and numpy."""
    if name not in _ENGINE:
        raise AttributeError(f"module 'phonograph' has no attribute {name!r}")
    return getattr(import_module(_ENGINE[name]), name)
