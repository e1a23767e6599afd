"""Grid: a function recorded by two dims, such as batch × length. Each size of the second has a `Graphed` of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phonograph.errors import DeclarationError
from phonograph.graphs.graphed import Graphed
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.phases.decisions import Decision, Reason
from phonograph.graphs.progress import Progress
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.trust.verify import VerifyReport


class GraphedGrid:
    """Serves a call by the smallest size of the second dim that holds it; there, by the bucket of the first.

    ```
    def by_length(length):
        dims = [Dim("length", limit=length)]
        return graphed(encode, slots=slots, bucketed="seqs", buckets=[1, 2, 4], dims=dims, pool=pool)

    run = GraphedGrid(by_length, dim="length", sizes=[32, 64, 128])
    ```

    `make` gives the function for one size, which is the limit of the dim there. Given one `pool`, all share input
    buffers and graph memory. Calls that no size holds run eagerly, counted as `too large` by the largest.
    """

    def __init__(self, make: Callable[[int], Graphed], *, dim: str, sizes: Buckets | Sequence[int]) -> None:
        self.dim = dim
        self.sizes = sizes if isinstance(sizes, Buckets) else Buckets(tuple(sizes))
        # The largest first: its buffers are large enough for the others.
        made = {size: make(size) for size in reversed(self.sizes.sizes)}
        self.by_size: Mapping[int, Graphed] = {size: made[size] for size in self.sizes}
        for size, run in self.by_size.items():
            found = run.runner.phase.all_dims.get(dim)
            if found is None or found.limit != size:
                raise DeclarationError(
                    f"a grid by {dim!r}: what was made for {size} has {found}. "
                    f"Give it dims=[Dim({dim!r}, limit=size)], with the size that make is passed."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._serving(args, kwargs)(*args, **kwargs)

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """What a call with these arguments would run."""
        return self._serving(args, kwargs).decide(*args, **kwargs)

    def _serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graphed:
        largest = self.by_size[self.sizes.largest]
        size = self.sizes.fit(largest.size_of(self.dim, args, kwargs))
        return self.by_size[size] if size is not None else largest

    def capture(self, progress: Progress | None = None, *, verify: bool | None = None) -> dict[int, CaptureReport]:
        """Record every bucket of every size, the largest first; by size, what was made."""
        made = {size: self.by_size[size].capture(progress, verify=verify) for size in reversed(self.sizes.sizes)}
        return dict(reversed(made.items()))

    def verify(self, *, batches: int = 2, seed: int = 0, tolerance: float | None = None) -> dict[int, VerifyReport]:
        """Check every recording of every size on random valid batches."""
        return {size: run.verify(batches=batches, seed=seed, tolerance=tolerance) for size, run in self.by_size.items()}

    def refresh(self, progress: Progress | None = None) -> dict[int, CaptureReport]:
        """Record again where one of the facts has changed."""
        return {size: run.refresh(progress) for size, run in self.by_size.items()}

    def release(self) -> None:
        """Free the graphs; calls run eagerly from then on."""
        for run in self.by_size.values():
            run.release()

    @property
    def replays(self) -> int:
        return sum(run.stats.num_replays for run in self.by_size.values())

    @property
    def eager(self) -> Counter[Reason]:
        """Eager calls by reason."""
        return sum((run.stats.eager for run in self.by_size.values()), Counter[Reason]())

    def explain(self) -> str:
        """For every size: what is captured, counts, and the reason of each eager call."""
        parts = [f"{self.dim}={size}: {run.runner.explain()}" for size, run in self.by_size.items()]
        return "\n".join([self.by_size[self.sizes.largest].plan.explain(), *parts])
