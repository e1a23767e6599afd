"""Captured: what a capture leaves to the runner."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.graphs.phases.decisions import RecordingGroup, ShapeKey
from phonograph.graphs.recording.backends import Recording
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.recording.carried import Carried
from phonograph.graphs.recording.facts import Settlement
from phonograph.graphs.recording.probing import Trimming


@dataclass(eq=False)
class Captured:
    """The recordings of a phase, and how to trim their outputs."""

    recordings: dict[ShapeKey, Recording]
    carried: dict[ShapeKey, Carried]
    """Snapshots of what each recording read of its sample besides slots: replays keep these values."""
    trimmings: dict[RecordingGroup, Trimming]
    report: CaptureReport
    facts: Settlement | None = None
    """What the recordings assume; None where facts are off, or nothing is recorded."""
