"""Late reads: inputs that a body reads after it has written memory of its own, which a caller may pass as that input.

Eagerly such an input shows what was written; a replay has copied it when the call began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from phonograph.devices.trace import OpWatch, tensors_in, written_tensors
from phonograph.graphs.recording.written_inputs import overlapped, span


@dataclass(frozen=True)
class WrittenMemory:
    """Memory that outlives a run, and that the run writes."""

    reference: StorageWeakRef
    name: str
    """What a tensor over it is called, where that is known."""

    @property
    def is_there(self) -> bool:
        return not self.reference.expired()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class LateReads:
    """By input, the memory that was written before the input was read for the last time."""

    by_input: dict[str, dict[int, WrittenMemory]] = field(default_factory=dict)

    @contextmanager
    def noting(
        self, inputs: Mapping[str, torch.Tensor], name_of: Callable[[torch.UntypedStorage], str]
    ) -> Iterator[None]:
        """Note those of one run."""
        spans = {name: span(tensor) for name, tensor in inputs.items() if tensor.numel()}
        made: set[int] = set()
        written: dict[int, torch.UntypedStorage] = {}
        late: dict[str, set[int]] = {}

        def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
            given = list(tensors_in((args, kwargs)))
            if written:
                for name in filter(None, (overlapped(tensor, spans) for tensor in given)):
                    late.setdefault(name, set()).update(written)
            result = func(*args, **kwargs)
            for storage in _storages(written_tensors(func, args, kwargs)):
                if storage._cdata not in made:
                    written[storage._cdata] = storage
            known = {storage._cdata for storage in _storages(given)}
            made.update(storage._cdata for storage in _storages(tensors_in(result)) if storage._cdata not in known)
            return result

        with OpWatch(run):
            yield
        for name, numbers in late.items():
            for number in numbers:
                reference = StorageWeakRef(written[number])  # type: ignore[no-untyped-call]
                self.by_input.setdefault(name, {})[number] = WrittenMemory(reference, name_of(written[number]))


def _storages(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            yield tensor.untyped_storage()
