"""EngineArguments: the arguments of an engine, as plain values that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phonograph.engine.checkpoints import open_for, random_checkpoint
from phonograph.engine.checkpoints.base import Checkpoint
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.errors import PlanError
from phonograph.graphs.planning.settings import Asked
from phonograph.graphs.progress import Progress, silent


@dataclass(frozen=True)
class EngineArguments:
    """The arguments of an `LLM`, by name: a path and not a checkpoint, a device's name and not the device."""

    model: str | None = None
    """A folder or a GGUF file; default: the embedded model."""
    shape: str | None = None
    """Random weights of this shape instead of a model."""
    device: str | None = None
    options: EngineOptions = EngineOptions()
    asked: Asked = Asked()

    @property
    def name(self) -> str:
        """The model's name where no other is given."""
        if self.shape is not None:
            return self.shape
        return "SmolLM2-135M-Instruct" if self.model is None else Path(self.model).expanduser().resolve().stem

    def checkpoint(self, *, needs_weights: bool = True) -> Checkpoint:
        """Open the checkpoint; reads headers only, and unless it `needs_weights`, config.json alone will do."""
        if self.shape is None:
            return open_for(self.model, self.options, needs_weights=needs_weights)
        if self.model is not None:
            raise PlanError(f"model {self.model!r} and shape {self.shape!r} exclude each other. Leave one of them out.")
        return random_checkpoint(self.shape, self.options.model_impl)

    def open(self, progress: Progress = silent) -> LLM:
        """Load the weights and capture."""
        return LLM(self.checkpoint(), device=self.device, options=self.options, asked=self.asked, progress=progress)
