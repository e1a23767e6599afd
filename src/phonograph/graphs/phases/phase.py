"""Phase: a forward pass as data (inputs, bucketed dim, body, tail, samples, admission). There is no class per phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.extent import Dim, Extent, check_dims, padded_sizes
from phonograph.graphs.inputs.fields import Path, expose, fetch
from phonograph.graphs.inputs.slot import Slot, check_slots, collect_dims
from phonograph.graphs.phases.axes import Axis, check_axes, described, named, spelled
from phonograph.graphs.phases.context import Stage, current
from phonograph.graphs.phases.decisions import RunEagerly, ShapeKey
from phonograph.graphs.phases.live_arguments import Live, hidden, refuse_returned
from phonograph.numbers import is_whole

SampleFunction = Callable[[Extent, int], Any]
"""Takes an extent and a seed; returns a random valid batch, or a `Sample`."""
Preserve = Callable[[Any], AbstractContextManager[Any]]
"""Takes a batch; saves the state that running it touches, and restores it at the end. It may yield the part of that
state which live rows may read, as tensors by name: `verify` compares that, and leaves null rows out of it."""
Admission = Callable[[Any, ShapeKey], RunEagerly | None]
"""Takes the batch and the recording that would serve it; returns why it must not, or None."""


@dataclass(frozen=True)
class Sample:
    """A random valid batch, and the keyword arguments that are passed with it."""

    batch: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """Everything that a runner needs to know about one kind of forward pass."""

    name: str
    slots: Sequence[Slot]
    bucketed: str
    """The dim whose size picks the recording."""
    body: Callable[..., Any]
    """Takes the view and the keyword arguments of the call; this is what is recorded."""
    sample: SampleFunction
    dims: Sequence[Dim] = ()
    smallest: int = 1
    """The smallest size of the bucketed dim that a batch may have; a smaller one runs eagerly."""
    host_plan: Callable[[Any, Extent], None] | None = None
    """Host work between load and replay, outside the graph; takes the view and the extent."""
    tail: Callable[[Any, Any], Any] | None = None
    """Takes the body's outputs and the batch; logits, pooling, sampling."""
    tail_captured: bool = False
    """Whether the tail is recorded with the body, and gets padded rows and the padded view as the body does; if not,
    it runs eagerly on the used rows and the live batch."""
    admission: Sequence[Admission] = ()
    axes: Sequence[Axis] = ()
    """Features that need recordings of their own; every product of their values may have some."""
    products: Sequence[Mapping[str, str]] | None = None
    """Which products are recorded: those that have all values of one of these, by axis; None for all of them."""
    without: frozenset[str] = frozenset()
    """Slots that graphs leave out: the batch's own value is carried."""
    eager_without: frozenset[str] = frozenset()
    """Slots that the eager path leaves out."""
    preserve: Preserve | None = None
    """Saves and restores the model's state, in tensors and in Python, around trial runs of capture and `verify`;
    without it, all that the body writes is found by running it, copied and restored."""
    adopt: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Existing tensors to use as buffers."""
    compares_others: bool = False
    """Whether admission compares all that a batch has besides slots with what the recording's sample had."""
    free: Sequence[str] = ()
    """Fields besides slots that a recording reads and that may differ: the sample's value serves every batch. A batch
    that differs in any other field that is read runs eagerly."""
    break_ops: frozenset[str] = frozenset()
    """Ops that `tc_piecewise` breaks at too, by name (`scaled_dot_product_attention`): for code that no mark is on."""
    live: Sequence[Live] = ()
    """Fields that a recording does not hold: gaps are passed the value of each call, other readers are refused."""

    def __post_init__(self) -> None:
        check_slots(self.slots)
        check_dims(self.all_dims, self.bucketed)
        check_axes(self.axes, self.products, self.name)
        if not is_whole(self.smallest, 1):
            raise DeclarationError(
                f"phase {self.name!r}: smallest is {self.smallest!r}. Give a whole number from 1 on."
            )
        names = {slot.name for slot in self.slots}
        unknown = (self.without | self.eager_without) - names
        if unknown:
            raise DeclarationError(
                f"phase {self.name!r} leaves out {sorted(unknown)}; its slots are {sorted(names)}. Name some of these."
            )
        if self.tail_captured and self.tail is None:
            raise DeclarationError(
                f"phase {self.name!r} has tail_captured, but no tail. Give tail=, or leave tail_captured out."
            )

    @property
    def all_dims(self) -> dict[str, Dim]:
        return collect_dims(self.slots, self.dims)

    @property
    def keyed(self) -> tuple[Slot, ...]:
        """Slots whose presence is part of the key."""
        return tuple(s for s in self.slots if s.keyed and s.name not in self.without)

    def padded(self, size: int) -> dict[str, int]:
        """The padded size of every dim in the recordings of one bucket."""
        return padded_sizes(self.all_dims, self.bucketed, size)

    def sample_for(self, key: ShapeKey, extent: Extent, seed: int) -> Sample:
        """A random valid batch of the key's product, with the key's absent slots absent."""
        sampled = self.sample(extent, seed)
        sample = sampled if isinstance(sampled, Sample) else Sample(sampled)
        if self.axes:
            sample = Sample(self._applied(sample.batch, key), sample.kwargs)
        absent: dict[Path, Any] = {slot.path: None for slot in self.slots if slot.name in key.absent}
        aside = {path: value for path, value in absent.items() if path[0] in sample.kwargs}
        within = {path: value for path, value in absent.items() if path not in aside}
        return Sample(expose(sample.batch, within), expose(dict(sample.kwargs), aside)) if absent else sample

    def _applied(self, batch: Any, key: ShapeKey) -> Any:
        """The plain batch with the values of the key's product."""
        wanted = spelled(self.axes, key.values)
        for axis, value in zip(self.axes, wanted, strict=True):
            if value != axis.plain:
                batch = axis.apply(batch, value)
        found = tuple(axis.of(batch) for axis in self.axes)
        if found != wanted:
            raise DeclarationError(
                f"the sample for {key} has {described(named(self.axes, found))}, expected {described(key.values)}. "
                "sample= makes a batch with the plain value of every axis, and Axis.apply sets one value of it."
            )
        return batch

    def inputs(self, batch: Any, kwargs: Mapping[str, Any], without: frozenset[str]) -> dict[str, torch.Tensor]:
        """By slot, the tensors that a batch has for the slots that it fills itself."""
        slots = [slot for slot in self.slots if slot.compute is None and slot.name not in without]
        found = {slot.name: fetch(batch, kwargs, slot.path) for slot in slots}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    @property
    def code(self) -> list[Callable[..., Any]]:
        """All callables of the phase that trial runs call."""
        called = (self.body, self.tail if self.tail_captured else None, self.host_plan)
        return [function for function in called if function is not None]

    def forward(self, batch: Any, kwargs: Mapping[str, Any], noting: Callable[[Any], Any] | None = None) -> Any:
        """The part of the pass that is recorded; `noting` makes a batch that notes what is read of it."""
        # Dynamo can't trace placeholders; a view that is traced has its own already.
        is_recorded = len(self.live) > 0 and current().stage not in (Stage.EAGER, Stage.COMPILING)
        if is_recorded:
            batch = hidden(batch, self.live)
        batch = batch if noting is None else noting(batch)
        outputs = self.body(batch, **kwargs)
        if self.tail is not None and self.tail_captured:
            outputs = self.tail(outputs, batch)
        if is_recorded:
            refuse_returned(outputs)
        return outputs


def sample_from(slots: Sequence[Slot], device: torch.device) -> SampleFunction:
    """A sample function that draws every slot inside its `valid` range, and what computed slots need the batch to have.

    Where an integer slot names no range, the only value known to be legal is the one it is padded with.
    """
    for slot in slots:
        if "." in slot.field:
            raise DeclarationError(
                f"drawing samples: slot {slot.name!r} has the dotted source {slot.field!r}, whose holder is not known. "
                "Give sample=, a function of (extent, seed)."
            )

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        batch: dict[str, Any] = {
            slot.field: draw(slot, extent.used, generator).to("cpu" if slot.place == "host" else device)
            for slot in slots
            if slot.compute is None
        }
        computed = {slot.field: _own_value(slot, batch, extent.used, generator) for slot in slots if slot.compute}
        return batch | {field: value for field, value in computed.items() if value is not None}

    return sample


def _own_value(slot: Slot, batch: Any, used: Mapping[str, int], generator: torch.Generator) -> Any:
    """What the batch has in the field of a computed slot, if it must have something there.

    It must where presence is part of the key, and where the function declines on the eager path.
    """
    assert slot.compute is not None
    if not slot.keyed and slot.compute(batch, Extent(used, used, for_graph=False)) is not None:
        return None
    value = slot.compute(batch, Extent(used, used))
    return value if value is not None else draw(slot, used, generator)


def draw(slot: Slot, used: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    """Random legal values for one slot."""
    shape = slot.sizes(used)
    if slot.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if slot.dtype.is_floating_point:
        if slot.valid is None:
            return torch.randn(shape, generator=generator).to(slot.dtype)
        low, high = (float(bound) for bound in slot.valid)
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(slot.dtype)
    if slot.valid is not None:
        low_int, high_int = math.ceil(slot.valid[0]), math.floor(slot.valid[1])
        padding = slot.pad.value if slot.pad is not None else None
        if padding is None or low_int == high_int or not low_int <= padding <= high_int:
            return torch.randint(low_int, high_int + 1, shape, generator=generator).to(slot.dtype)
        # Not the pad value: the row that it names belongs to no sequence.
        drawn = torch.randint(low_int, high_int, shape, generator=generator)
        return (drawn + (drawn >= padding)).to(slot.dtype)
    assert slot.pad is not None
    return torch.full(shape, int(slot.pad.value or 0), dtype=slot.dtype)
