"""Tensor state: what a forward pass writes besides its outputs; found, saved, and restored after trial runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from phonograph.devices import Device
from phonograph.devices.refused import Refused
from phonograph.devices.trace import tensors_in, user_frame, watching_ops, written_tensors
from phonograph.errors import CaptureError

_MAX_VERSIONS = 8
_MAX_SUSPECT_BYTES = 16 << 20
_CLOSED_OPS = ("aten", "prims", "prim")


@dataclass(eq=False)
class MemoryRun:
    """What one trial run did to memory. Weak references keep a freed storage's id from being reused."""

    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    versions: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Of memory that the run made: what it held before each of the first writes to it."""
    num_writes: Counter[int] = field(default_factory=Counter)
    uses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Memory that earlier trial runs made and this one uses."""
    suspects: list[tuple[torch.UntypedStorage, torch.Tensor, torch.dtype]] = field(default_factory=list)
    """Memory that ops may write without declaring it, and what it held."""

    def survivors(self) -> set[int]:
        """The memory that is still there, of all that the run made."""
        return {number for number, reference in self.made.items() if not _is_gone(reference)}


class SavedState:
    """What trial runs overwrite in memory that they did not make, and what they make and later runs overwrite.

    Ops that torch dispatches are seen. What is written without the schema saying so is found by value, for tensors
    that the caller names and for arguments of custom ops; both up to a size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._seen: set[int] = set()
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._dtypes: list[torch.dtype] = []
        self._born: dict[int, StorageWeakRef] = {}
        self.skipped_bytes = 0
        """Bytes of tensors that were too large to save."""

    @contextmanager
    def watching(self, suspects: Iterable[torch.Tensor] = ()) -> Iterator[MemoryRun]:
        """Save whatever is written in here for the first time."""
        run, refused = MemoryRun(), Refused()
        for tensor in suspects:
            self._suspect(tensor, run)

        def before(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            try:
                self._before(run, func, args, kwargs)
            except CaptureError as error:
                refused.note(error)
                raise

        def after(func: Any, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
            self._after(run, args, kwargs, result)

        try:
            with refused.insisted_on(), watching_ops(before, after):
                yield run
        finally:
            self._keep_changed(run)
            self._born |= {number: run.made[number] for number in run.survivors()}

    def settle(self, first: MemoryRun, second: MemoryRun) -> None:
        """Of what the first run made, save what the second writes, at its value when made.

        The first run's writes are those that make the value, and then as many as every run does.
        """
        for number in first.survivors() & second.num_writes.keys():
            index = max(0, first.num_writes[number] - second.num_writes[number])
            versions = first.versions.get(number, [])
            if first.num_writes[number] and index >= len(versions):
                raise CaptureError(
                    f"the body makes a tensor in its first run, with {index} writes, and writes to it in every run",
                    "Call the function once before capture(), or make the tensor outside of it",
                )
            if versions:
                self._replace(number, versions[index])

    def restore(self) -> None:
        """Put back everything that was saved."""
        with torch.no_grad():
            for memory, before in self._saved:
                memory.copy_(before)

    @property
    def memory(self) -> list[torch.Tensor]:
        """All that was saved, as bytes."""
        return [memory for memory, _ in self._saved]

    @property
    def elements(self) -> list[torch.Tensor]:
        """The same memory, in the dtype in which it was first written."""
        return [
            memory.view(dtype) if memory.numel() % dtype.itemsize == 0 else memory
            for memory, dtype in zip(self.memory, self._dtypes, strict=True)
        ]

    # -- one op -------------------------------------------------------------------------------------------

    def _before(self, run: MemoryRun, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for tensor in tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            number = storage._cdata
            if number not in run.made and _wraps_others(tensor):
                raise CaptureError(
                    f"{func} takes a {type(tensor).__name__}, whose memory is that of other tensors, and what becomes "
                    "of these is not seen",
                    "Have the body take the tensors that it is made of, or run it without graphs",
                    op=str(func),
                    frame=user_frame(),
                )
            if number in self._born and number not in run.made and number not in run.uses:
                run.uses[number] = bytes_of(storage)
        if func.namespace not in _CLOSED_OPS and not func._schema.is_mutable:
            for tensor in tensors_in((args, kwargs)):
                if not isinstance(tensor, torch.nn.Parameter) and tensor.untyped_storage()._cdata not in run.made:
                    self._suspect(tensor, run)
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            number = storage._cdata
            if number in run.made:
                self._note_version(run, storage)
            elif number not in self._seen:
                self._save(storage, bytes_of(storage).clone, tensor.dtype)
            run.num_writes[number] += 1

    @staticmethod
    def _after(run: MemoryRun, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                run.made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @staticmethod
    def _note_version(run: MemoryRun, storage: torch.UntypedStorage) -> None:
        held = run.versions.setdefault(storage._cdata, [])
        if not held:
            # Most memory that is written in place is freed soon, and its content is not needed.
            for number in [number for number in run.versions if number in run.made and _is_gone(run.made[number])]:
                del run.versions[number]
        if len(held) < _MAX_VERSIONS:
            held.append(bytes_of(storage).clone())

    # -- saving -------------------------------------------------------------------------------------------

    def _suspect(self, tensor: torch.Tensor, run: MemoryRun) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta or _wraps_others(tensor):
            return
        storage = tensor.untyped_storage()
        if 0 < storage.nbytes() <= min(_MAX_SUSPECT_BYTES, self._room) and storage._cdata not in self._seen:
            run.suspects.append((storage, bytes_of(storage).clone(), tensor.dtype))

    def _keep_changed(self, run: MemoryRun) -> None:
        for storage, before, dtype in run.suspects:
            if storage._cdata not in self._seen and not torch.equal(bytes_of(storage), before):
                self._save(storage, before.clone, dtype)
                run.num_writes[storage._cdata] += 1
        run.suspects.clear()

    def _save(self, storage: torch.UntypedStorage, before: Any, dtype: torch.dtype) -> None:
        self._seen.add(storage._cdata)
        if storage.nbytes() > self._room:
            self.skipped_bytes += storage.nbytes()
            return
        self._room -= storage.nbytes()
        self._saved.append((bytes_of(storage), before()))
        self._dtypes.append(dtype)

    def _replace(self, number: int, before: torch.Tensor) -> None:
        self._saved = [
            (memory, before if memory.untyped_storage()._cdata == number else was) for memory, was in self._saved
        ]


def generators_restored(device: Device) -> AbstractContextManager[None]:
    """Restore the generators at the end: draws inside don't advance them."""
    on = device.torch_device
    if on.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([on], device_type=on.type)


def _wraps_others(tensor: torch.Tensor) -> bool:
    """Whether its memory is that of other tensors: a nested, masked or quantised one, or another class of such kind."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    if is_traceable_wrapper_subclass(tensor):
        return True
    if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    try:
        return storage.nbytes() > 0 and storage.data_ptr() == 0
    except RuntimeError:  # a storage that may not even be asked
        return True


def _is_gone(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's whole memory as a tensor that keeps it alive."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    memory: torch.Tensor = empty.set_(storage)
    return memory
