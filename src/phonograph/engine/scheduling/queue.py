"""WaitingQueue: the order in which sequences get a row: by priority and arrival; by age once they waited long."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from phonograph.engine.requests.sequence import Rank, Sequence


class WaitingQueue:
    """Sequences that wait for a row, the lowest rank first.

    A rank changes once: when its sequence is older than `patience` steps it goes before every priority. From then on
    no other overtakes it, waiting or running, so it is served in a bounded number of steps whatever else arrives.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._heap: list[tuple[Rank, Sequence]] = []
        self._members: set[Sequence] = set()
        self._young: deque[tuple[int, Sequence]] = deque()
        self._blocked: tuple[Sequence, int] | None = None
        """A head that did not fit, and the number of changes of the rows by then."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return iter(self._members)

    def watch(self, sequence: Sequence, step: int) -> None:
        """Count the sequence's age from this step on; does not queue it."""
        self._young.append((step, sequence))

    def push(self, sequence: Sequence) -> None:
        self._members.add(sequence)
        heappush(self._heap, (sequence.rank, sequence))

    def peek(self) -> Sequence | None:
        """The first in the order; stays in the queue."""
        while self._heap:
            rank, sequence = self._heap[0]
            if sequence in self._members and sequence.rank == rank:
                return sequence
            heappop(self._heap)
        return None

    def admissible(self, num_changes: int) -> Sequence | None:
        """The first in the order, unless it did not fit and nothing has changed since; no one overtakes it."""
        head = self.peek()
        return None if head is None or self._blocked == (head, num_changes) else head

    def block(self, sequence: Sequence, num_changes: int) -> None:
        """The head did not fit among rows after so many changes."""
        self._blocked = sequence, num_changes

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands; nothing happens if it isn't in."""
        self._members.discard(sequence)
        # Removed entries stay in the heap until they surface; a mass cancellation must not keep prompts alive.
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(sequence.rank, sequence) for sequence in self._members]
            heapify(self._heap)

    def age(self, step: int) -> None:
        """Move those older than the patience before every priority."""
        young = self._young
        while young and (young[0][1].finish is not None or young[0][0] + self._patience < step):
            _, sequence = young.popleft()
            _, _, arrival, serial = sequence.rank
            sequence.rank = (0, 0, arrival, serial)
            if sequence in self._members:
                heappush(self._heap, (sequence.rank, sequence))
