"""phonograph records a forward pass once as a device graph, replays it, and always knows that the replay is right."""

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
    UnavailableError,
    VerifyError,
)
from phonograph.graphs.axes import Axis
from phonograph.graphs.breaks import break_graph, graph_break
from phonograph.graphs.buckets import Buckets
from phonograph.graphs.buffers import LoadMode, Registry
from phonograph.graphs.capture_report import CaptureReport
from phonograph.graphs.context import Stage, current
from phonograph.graphs.decisions import Reason, Replay, RunEagerly, ShapeKey
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.phase import Phase, Sample
from phonograph.graphs.pool import BufferPool
from phonograph.graphs.resolve import PhasePlan, Plan, resolve
from phonograph.graphs.runner import Runner, RunnerOptions
from phonograph.graphs.slots import Pad, Slot
from phonograph.graphs.verify import VerifyReport, verify
from phonograph.graphs.wrap import Graphed, graphed

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.options import EngineOptions
    from phonograph.engine.request import SamplingParams

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
    "SamplingParams": "phonograph.engine.request",
}


def __getattr__(name: str) -> object:
    """The engine is imported when it is first named: the graph layer alone needs only torch and numpy."""
    if name not in _ENGINE:
        raise AttributeError(f"module 'phonograph' has no attribute {name!r}")
    return getattr(import_module(_ENGINE[name]), name)
