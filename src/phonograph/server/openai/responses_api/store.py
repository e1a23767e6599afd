"""ResponseStore: stored responses by id, within a byte budget and a time to live, visible only to their owner."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_OVERHEAD = 512
"""Bytes that an entry takes besides its texts."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, encoded; each reader decodes its own copy."""

    body: bytes
    """As the client got it."""
    items: bytes
    """JSON of the input's items."""
    messages: bytes
    """JSON of the conversation so far, this response included, without instructions: the start of a next one."""

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + len(self.messages) + _OVERHEAD


class ResponseStore:
    """Keeps responses by owner and id. When bytes run out, the owner with the most bytes loses its oldest: heavy use by
    one owner evicts nobody else's. Thread-safe."""

    def __init__(self, max_bytes: int, max_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._clock = clock
        self._entries: dict[bytes, OrderedDict[str, tuple[float, StoredResponse]]] = {}
        """By owner, the oldest first."""
        self._sizes: dict[bytes, int] = {}
        self.num_bytes = 0
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def put(self, owner: bytes, id: str, response: StoredResponse) -> bool:
        """Keep a response; False if it is larger than all that may be kept."""
        with self._lock:
            self._drop_expired()
            if response.size > self._max_bytes:
                return False
            while self.num_bytes + response.size > self._max_bytes:
                largest = max(self._sizes, key=lambda one: self._sizes[one])
                self._drop(largest, next(iter(self._entries[largest])))
            self._entries.setdefault(owner, OrderedDict())[id] = (self._clock(), response)
            self._count(owner, response.size)
            return True

    def get(self, owner: bytes, id: str) -> StoredResponse | None:
        """The response with this id, if it is the owner's and still stored."""
        with self._lock:
            self._drop_expired()
            entries = self._entries.get(owner)
            found = entries.get(id) if entries is not None else None
            return None if found is None else found[1]

    def delete(self, owner: bytes, id: str) -> bool:
        """Forget a response; False if there is none."""
        with self._lock:
            self._drop_expired()
            if id not in self._entries.get(owner, {}):
                return False
            self._drop(owner, id)
            return True

    def _drop_expired(self) -> None:
        oldest = self._clock() - self._max_seconds
        for owner in list(self._entries):
            while (entries := self._entries.get(owner)) and next(iter(entries.values()))[0] < oldest:
                self._drop(owner, next(iter(entries)))

    def _drop(self, owner: bytes, id: str) -> None:
        _, response = self._entries[owner].pop(id)
        self._count(owner, -response.size)
        if not self._entries[owner]:
            del self._entries[owner], self._sizes[owner]

    def _count(self, owner: bytes, size: int) -> None:
        self._sizes[owner] = self._sizes.get(owner, 0) + size
        self.num_bytes += size
