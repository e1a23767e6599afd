"""Pass: one forward pass of the engine, as data: its batches, what is recorded of it, and what runs after that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.models.interface import Model
from phonograph.engine.ops.attention.traced import TracedAttention
from phonograph.engine.ops.layers.reference import TracedKernels
from phonograph.engine.passes.drafter_failures import DrafterFailures
from phonograph.engine.passes.registry import PassDeclaration
from phonograph.engine.passes.sample_batches import Trials
from phonograph.engine.passes.sampling_tail import SamplingTail
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.limits import Limits
from phonograph.engine.sampling.sampler import Sampler
from phonograph.engine.state.tables import RequestTables
from phonograph.graphs.inputs.extent import Dim
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.phases import phase
from phonograph.graphs.phases.axes import Axis


@dataclass(frozen=True)
class PassParts:
    """What the passes of one engine are made from; all of them share it."""

    model: Model
    sampler: Sampler
    tables: RequestTables
    cache: CacheGroup
    beside: Mapping[str, CacheGroup]
    """The groups of passes that keep something of their own, by pass; they have the page numbers of `cache`."""
    limits: Limits
    gives_states: bool = False
    """Whether requests may ask for hidden states."""

    def model_for(self, backend: str) -> Model:
        """The model as a pass with this backend runs it.

        A pass that is to be compiled computes its layers in torch ops, so that there is something to compile; attention
        and what is written to pages are calls that the compiler does not look into.
        """
        if backend != "tc_piecewise":
            return self.model
        return self.model.with_kernels(TracedKernels()).with_attention(TracedAttention(self.model.attention))

    @cached_property
    def trials(self) -> Trials:
        """Sample state for trial runs."""
        caches = (self.cache, *self.beside.values())
        return Trials(self.tables, caches, self.limits, self.model.config.vocab)

    @cached_property
    def drafter_failures(self) -> DrafterFailures:
        """Of the drafters of all passes."""
        return DrafterFailures()

    @cached_property
    def tail(self) -> SamplingTail:
        """What picks tokens from logits, in every pass."""
        return SamplingTail(self.tables, self.sampler, self.model.kernels)


def _never(step: Step) -> bool:
    return False


@dataclass(frozen=True)
class Pass:
    """What the executor runs a step with."""

    declared: PassDeclaration
    tokens_per_row: int | None
    """Tokens that it computes for each row of a batch: 1, a fixed number, or None where rows differ."""
    bucketed: str
    """The dim whose size picks the recording."""
    slots: Sequence[Slot]
    batch: Callable[[Step], Any]
    """The batch of a step that names this pass."""
    body: Callable[..., Any]
    """What is recorded. Takes a batch; in a chain, also what the pass before it returned."""
    sample: phase.SampleFunction
    preserve: phase.Preserve
    written: Callable[[Any], tuple[torch.Tensor, torch.Tensor]] | None = None
    """(rows, positions), on the device, whose keys and values a batch writes, rows that decode with all places of
    theirs. A pass that does not say is not checked in service."""
    public: Collection[str] = ()
    """Fields of its batches that reveal nothing of a request's tokens, so that reproducers may contain them."""
    is_steady: Callable[[Step], bool] = _never
    """Whether a step's batch equals the last one, except for the tables: it is then repeated without a load."""
    dims: Sequence[Dim] = ()
    tail: Callable[[Any, Any], Any] | None = None
    """Takes what the body returned and the batch; runs eagerly, after the recording."""
    before: str | None = None
    """The pass that runs before it, by a recording of its own, in steps that say so (`Step.catches_up`)."""
    then: str | None = None
    """The pass that runs after it in the same step, by a recording of its own, on the batch that the tail hands to it
    (`Picked.handed`); where that is None, it does not run."""
    picks: bool = True
    """Whether it picks tokens; one that only runs after another need not."""
    axes: Sequence[Axis] = ()
    reads: Sequence[str] = ()
    """Columns of passes that its body reads, by name; what every engine has need not be named."""
    writes: Sequence[str] = ()
    """Columns that its body or tail writes, by name."""
    free: Sequence[str] = ("width",)
    """Fields of batches, besides slots, whose value in a recording serves every batch, such as the most pages that a
    row can have."""

    check: Callable[[], None] | None = None
    """Called before anything is recorded or served; raises where what the pass is made of can't serve."""

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def picks_in_recording(self) -> bool:
        """Whether its recordings read whatever picking may need: columns that only some requests ask for, too."""
        return self.picks and self.tail is None and self.declared.serves

    def phase(self) -> phase.Phase:
        """The pass as the graph layer records it."""
        return phase.Phase(
            name=self.name,
            slots=self.slots,
            bucketed=self.bucketed,
            body=self.body,
            sample=self.sample,
            dims=self.dims,
            tail=self.tail,
            axes=self.axes,
            free=self.free,
            preserve=self.preserve,
        )
