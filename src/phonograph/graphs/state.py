"""State that a forward pass writes besides its outputs: found, saved, and put back after trial runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phonograph.devices.trace import before_writes


class SavedState:
    """What trial runs overwrite in memory that they did not make.

    Only ops that torch dispatches are seen: a custom kernel must declare what it mutates.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._seen: set[int] = set()
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._dtypes: list[torch.dtype] = []
        self.skipped_bytes = 0
        """Bytes of tensors that were too large to save."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Save whatever is written in here for the first time."""
        with before_writes(self._save):
            yield

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

    def _save(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        if storage._cdata in self._seen:
            return
        if storage.nbytes() > self._room:
            self._seen.add(storage._cdata)
            self.skipped_bytes += storage.nbytes()
            return
        self._room -= storage.nbytes()
        memory = bytes_of(storage)
        self._seen.add(storage._cdata)
        self._saved.append((memory, memory.clone()))
        self._dtypes.append(dtype)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's whole memory as a tensor that keeps it alive."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    memory: torch.Tensor = empty.set_(storage)
    return memory
