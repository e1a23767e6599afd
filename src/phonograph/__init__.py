"""phonograph: records a forward pass once as a device graph, replays it, and always knows that the replay is right."""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from phonograph.devices import Device, EmulatedDevice, open_device
    from phonograph.engine.llm import LLM
    from phonograph.engine.options import EngineOptions
    from phonograph.engine.requests.request import SamplingParams
    from phonograph.graphs.graphed import Graphed, graphed
    from phonograph.graphs.grid import GraphedGrid
    from phonograph.graphs.inputs.extent import Dim, Extent
    from phonograph.graphs.inputs.pool import BufferPool
    from phonograph.graphs.inputs.registry import LoadMode, Registry
    from phonograph.graphs.inputs.slot import Pad, Slot
    from phonograph.graphs.phases.axes import Axis
    from phonograph.graphs.phases.breaks import break_graph, graph_break
    from phonograph.graphs.phases.buckets import Buckets
    from phonograph.graphs.phases.context import Stage, current
    from phonograph.graphs.phases.decisions import Reason, Replay, RunEagerly, ShapeKey
    from phonograph.graphs.phases.opaque import opaque
    from phonograph.graphs.phases.phase import Phase, Sample
    from phonograph.graphs.planning.resolve import PhasePlan, Plan, resolve
    from phonograph.graphs.planning.settings import ask
    from phonograph.graphs.recording.capture_report import CaptureReport
    from phonograph.graphs.running.runner import Runner
    from phonograph.graphs.running.runner_options import RunnerOptions
    from phonograph.graphs.trust.verify import VerifyReport, verify

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
    "GraphedGrid",
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
    "ask",
    "break_graph",
    "current",
    "graph_break",
    "graphed",
    "opaque",
    "open_device",
    "resolve",
    "verify",
]

_MODULES = {
    "LLM": "phonograph.engine.llm",
    "Axis": "phonograph.graphs.phases.axes",
    "Buckets": "phonograph.graphs.phases.buckets",
    "BufferPool": "phonograph.graphs.inputs.pool",
    "CaptureReport": "phonograph.graphs.recording.capture_report",
    "Device": "phonograph.devices",
    "Dim": "phonograph.graphs.inputs.extent",
    "EmulatedDevice": "phonograph.devices",
    "EngineOptions": "phonograph.engine.options",
    "Extent": "phonograph.graphs.inputs.extent",
    "Graphed": "phonograph.graphs.graphed",
    "GraphedGrid": "phonograph.graphs.grid",
    "LoadMode": "phonograph.graphs.inputs.registry",
    "Pad": "phonograph.graphs.inputs.slot",
    "Phase": "phonograph.graphs.phases.phase",
    "PhasePlan": "phonograph.graphs.planning.resolve",
    "Plan": "phonograph.graphs.planning.resolve",
    "Reason": "phonograph.graphs.phases.decisions",
    "Registry": "phonograph.graphs.inputs.registry",
    "Replay": "phonograph.graphs.phases.decisions",
    "RunEagerly": "phonograph.graphs.phases.decisions",
    "Runner": "phonograph.graphs.running.runner",
    "RunnerOptions": "phonograph.graphs.running.runner_options",
    "Sample": "phonograph.graphs.phases.phase",
    "SamplingParams": "phonograph.engine.requests.request",
    "ShapeKey": "phonograph.graphs.phases.decisions",
    "Slot": "phonograph.graphs.inputs.slot",
    "Stage": "phonograph.graphs.phases.context",
    "VerifyReport": "phonograph.graphs.trust.verify",
    "ask": "phonograph.graphs.planning.settings",
    "break_graph": "phonograph.graphs.phases.breaks",
    "current": "phonograph.graphs.phases.context",
    "graph_break": "phonograph.graphs.phases.breaks",
    "graphed": "phonograph.graphs.graphed",
    "opaque": "phonograph.graphs.phases.opaque",
    "open_device": "phonograph.devices",
    "resolve": "phonograph.graphs.planning.resolve",
    "verify": "phonograph.graphs.trust.verify",
}
"""Lazy imports: torch takes seconds to import, and `phonograph --help` does not need it."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'phonograph' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
