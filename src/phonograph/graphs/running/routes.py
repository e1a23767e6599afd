"""Routes: the recording that serves each size of each product, decided before any batch comes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from phonograph.graphs.inputs.fields import fetch
from phonograph.graphs.phases.axes import all_products, described, named, spelled, stronger_products
from phonograph.graphs.phases.decisions import Decision, Reason, RecordingGroup, Replay, RunEagerly, ShapeKey
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.phases.selection import Selection, absences_of
from phonograph.graphs.planning.resolve import PhasePlan

Route = list[Decision]
"""By used size."""
_NOBODY: frozenset[str] = frozenset()
_NOTHING: Mapping[ShapeKey, RunEagerly] = {}


class Routes:
    """The routes of one phase; made anew when recordings come or go."""

    def __init__(self, selection: Selection) -> None:
        self._phase: Phase = selection.phase
        self._selection = selection
        self._axes = [axis.of for axis in self._phase.axes]
        self._keyed = self._phase.keyed
        self._routes: dict[tuple[tuple[str, ...], frozenset[str]], Route] = {}
        self.standing_in: dict[ShapeKey, ShapeKey] = {}
        """By what has no recording of its own, the one that serves its batches."""
        self.only: Route | None = None
        """The route of every batch, where the phase tells none apart."""

    def settle(
        self, plan: PhasePlan, captured: Collection[ShapeKey], refused: Mapping[ShapeKey, RunEagerly] = _NOTHING
    ) -> None:
        """Decide for every product and size; `refused` says of keys without a recording why they have none."""
        phase = self._phase
        self._routes.clear()
        self.standing_in.clear()
        known = [(product, absent) for product in all_products(phase.axes) for absent in absences_of(phase)]
        own = {
            group: [
                self._decide(used, group, plan, captured, refused)
                for used in range(self._selection.sizes[group[0]].largest + 1)
            ]
            for group in known
            if group[0] in self._selection.sizes
        }
        for product, absent in known:
            groups = [(one, absent) for one in (product, *stronger_products(phase.axes, product))]
            routes = [own[group] for group in groups if group in own]
            if routes:
                values = spelled(phase.axes, product)
                self._routes[values, absent] = self._merged((product, absent), routes)
        if not self._axes and not self._keyed:
            self.only = self._routes[(), _NOBODY]

    def of(self, batch: Any, kwargs: Mapping[str, Any]) -> Route | None:
        """The route of a batch, or None where no recording serves its product; `refusal` then says why."""
        return self._routes.get((tuple([of(batch) for of in self._axes]), self._absent(batch, kwargs)))

    def refusal(self, batch: Any) -> RunEagerly:
        """Why no recording serves the product of a batch."""
        axes = self._phase.axes
        values = [axis.of(batch) for axis in axes]
        wrong = [f"{axis.name}={value!r}" for axis, value in zip(axes, values, strict=True) if value not in axis.values]
        if wrong:
            return RunEagerly(Reason.FEATURE_NOT_CAPTURED, f"{wrong[0]} is no value of its axis")
        product = named(axes, values)
        left_out = next((str(one) for one in self._selection.left_out if one.product == product), "")
        detail = f"left out: {left_out}" if left_out else f"no recordings for {described(product)}"
        return RunEagerly(Reason.FEATURE_NOT_CAPTURED, detail)

    def _absent(self, batch: Any, kwargs: Mapping[str, Any]) -> frozenset[str]:
        if not self._keyed:
            return _NOBODY
        return frozenset([slot.name for slot in self._keyed if fetch(batch, kwargs, slot.path) is None])

    def _merged(self, group: RecordingGroup, routes: list[Route]) -> Route:
        """At every size the first that replays, else what is said of the first."""
        merged = [
            next((one for one in options if isinstance(one, Replay)), options[0])
            for options in zip(*routes, strict=True)
        ]
        for decision in merged:
            if isinstance(decision, Replay) and decision.key.group != group:
                key = decision.key
                self.standing_in[ShapeKey(key.phase, key.dim, key.size, *group)] = key
        return merged

    def _decide(
        self,
        used: int,
        group: RecordingGroup,
        plan: PhasePlan,
        captured: Collection[ShapeKey],
        refused: Mapping[ShapeKey, RunEagerly],
    ) -> Decision:
        dim = self._phase.bucketed
        size = self._selection.sizes[group[0]].fit(used)
        if size is None:
            return RunEagerly(Reason.NOT_CAPTURED, f"{used} {dim} is not one of the exact sizes")
        key = ShapeKey(self._phase.name, dim, size, *group)
        if key in refused:
            return refused[key]
        wasted = size - used
        if size > plan.max_padding_ratio * used and wasted > plan.max_padding_rows:
            return RunEagerly(Reason.OVER_PADDED, f"{used} {dim} in a bucket of {size} would waste {wasted} rows")
        if key not in captured:
            return RunEagerly(Reason.NOT_CAPTURED, f"{key} is not captured. Call capture()")
        return Replay(key)
