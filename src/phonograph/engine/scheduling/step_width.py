"""StepWidth: how many tokens of each row that decodes a step computes: a round, a narrower one, or one token where
drafts don't pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Protocol

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk, ScheduledStep, Update
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.acceptance import Acceptance, Brought
from phonograph.engine.scheduling.row_use import RowUse, has_room

_STAKE, _LEAST_STAKE, _STAKE_BY_DOUBLING = 2.0, 1.0, 0.125
"""The time, in plain steps, that probes of one row may take at first, should nothing be drafted right; that of 256 rows
or more, of which one tells as much as many of one row; and how much less it is for twice the rows."""
_PROBE_SHARE = 0.0015
"""Of the time of all steps, what further probes may take for each plain step of the stake."""
_DEAREST = 3.5
"""In plain steps, what a probe may cost: one of 512 steps, and no more than that is lost by it."""
_LAUNCH_PRICE = 0.1
"""Of a probe, besides what the drafter does: a launch, two loads, and a copy to the host. With a small model; with a
large one it is less."""
_LEAST_EXTRA = 0.02
"""Of a wider round, by which it is paid for: another recording is launched, if nothing else."""
_WIDE_ROUNDS = 3
"""That look what a wider round than the one in use brings. The first of them has old drafts to verify."""
_STREAK = 4.0
"""The time, in plain steps, that rounds which were to pay may lose before all that is known of them is given up."""
_MARGIN = 1.02
"""Another width must promise this much more before steps change to it, so that noise does not switch."""
_SHARE_WEIGHT = 1 / 32
"""Of a step in the share of those with prompts."""
_SELDOM = 0.02
"""A share of steps with prompts below which it does not matter what these cost."""
_START_WEIGHT = 1 / 16
"""Of a step in which rounds are wanted in how often that begins."""
_MOST_WON = 8.0
"""The time, in plain steps, of what rounds have gained that makes up for what they lose later."""
_HELD_MARGIN = 0.05
"""In plain steps, what rounds must gain a step before they are launched again where prompts made them lose."""


def stake_of(num_rows: int) -> float:
    """The time, in plain steps, that probes of so many rows may take at once."""
    return max(_LEAST_STAKE, _STAKE - _STAKE_BY_DOUBLING * (num_rows.bit_length() - 1))


class Planned(NamedTuple):
    """The form of a step."""

    width: int
    """Tokens that it computes for each row that decodes: one of the widths that the engine records, or 1."""
    probes: bool = False
    """Whether drafts are made before it although it is plain, to be compared with the tokens that come."""


Prompt = Chunk | Sequence
"""A part of a prompt that a step has, or a sequence that may have one in it."""


class StepWidth(Protocol):
    """Policy for the width of steps; consecutive steps with the same tuple of decodes should rarely differ."""

    def of(self, decodes: tuple[Sequence, ...], prompts: Collection[Prompt] = ()) -> Planned:
        """For a step with these decodes, and with parts of prompts or, where what is left of the step for these is not
        known yet, of whoever may have some. Without decodes, the width says how much is drafted for rows whose prompts
        end: nothing by 1."""
        ...

    def took(self, step: ScheduledStep, updates: Collection[Update], probed: Collection[Counter[Brought]]) -> None:
        """What the commit of a step brought, and what rounds would have brought, of each probe that ends with it."""
        ...


class WhereDrafted:
    """Rounds, unless no row takes drafts: then a plain step does the same for less."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.tokens_per_row
        self._decodes: tuple[Sequence, ...] | None = None
        self._planned = Planned(self._most)

    def of(self, decodes: tuple[Sequence, ...], prompts: Collection[Prompt] = ()) -> Planned:
        if self._most > 1 and (not decodes or decodes is not self._decodes):
            depth, sequences = self._most - 1, decodes or _ending(prompts)
            is_drafted = any(sequence.draft_depth(depth) for sequence in sequences)
            self._decodes, self._planned = decodes, Planned(self._most if is_drafted else 1)
        return self._planned

    def took(self, step: ScheduledStep, updates: Collection[Update], probed: Collection[Counter[Brought]]) -> None:
        """Stateless: nothing to record."""

    def __str__(self) -> str:
        return "wherever a request allows drafts"


class WherePaid:
    """Of all widths the one by which recent rounds gain most in tokens for their time, or plain steps; and now and then
    a probe: drafts before a plain step that are compared with what comes, or wider rounds than those in use.

    A step with prompts has a round where that takes less time than the tokens that it brings would take in steps
    without any, and what the drafter would have to do after a plain one. A probe is paid for when it is launched, as if
    it brought nothing: what is in flight counts.
    """

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        depth = limits.tokens_per_row - 1
        self._drafted = WhereDrafted(limits)
        self._costs = costs
        self._ratios: dict[tuple[int, bool], dict[int, float]] = {}
        """By rows, with prompts or without: what steps cost by width, of those that there were."""
        self._acceptance, self._use = Acceptance(depth), RowUse(limits)
        self._width = 1
        """That of steps without prompts which are no probes."""
        self._share = 0.0
        """Of recent steps with decodes, those that had prompts."""
        self._is_held = False
        """Whether steps are plain since those with prompts lose what others would gain by rounds."""
        self._last = 1
        """The width of the last step with decodes."""
        self._credit, self._saved = _STAKE, 0.0
        """The time, in plain steps, that probes may take; and what is saved for one that is dearer than the stake."""
        self._is_first = True
        """Whether there was no probe yet."""
        self._apart = depth
        """Steps between two probes at least: what one shows is known after so many."""
        self._num_since = self._apart
        """Steps since the last probe."""
        self._wide_left = 0
        """Rounds of a look at the widest that are yet to be launched."""
        self._wide_paid = 0.0
        """What each of them costs more than those in use, in plain steps."""
        self._lost = self._won = 0.0
        """The time, in plain steps, that recent rounds lost which were to pay, no less than none; and what rounds have
        won, no more than what may make up for losses."""
        self._begins, self._is_wanted = 0.0, False
        """Of recent steps without prompts that wanted a round, those before which none was; whether the last did."""

    def of(self, decodes: tuple[Sequence, ...], prompts: Collection[Prompt] = ()) -> Planned:
        planned, has_prompts = self._drafted.of(decodes, prompts), bool(prompts)
        if not decodes:
            tokens = self._acceptance.tokens(self._width)
            return planned if self._width > 1 and has_room(_ending(prompts), tokens) else Planned(1)
        self._share += _SHARE_WEIGHT * (has_prompts - self._share)
        if planned.width > 1:
            num_rows = len(decodes)
            self._use.look(decodes)
            width, ratios = self._paying(num_rows, has_prompts=has_prompts)
            planned = self._plain(ratios, num_rows) if width == 1 else self._round(width, ratios, stake_of(num_rows))
        else:
            self._wide_left = 0  # what is left of a look would begin with old drafts
        self._last = planned.width
        return planned

    def _paying(self, num_rows: int, *, has_prompts: bool) -> tuple[int, dict[int, float]]:
        """The width of a step that is no probe, and what it costs by width."""
        alone, best = self._ratios_of(num_rows, has_prompts=False), 1
        among = self._ratios_of(num_rows, has_prompts=True) if has_prompts else alone
        self._width = self._best(alone)
        if self._width == 1 or not (has_prompts or self._share > _SELDOM):
            self._is_held, among = False, alone
        else:
            best = self._held(num_rows, alone)
        width = best if has_prompts else self._begun(num_rows, alone)
        if width > 1 and (share := self._use.share_with_room(width, tokens := self._tokens(width))) < 1:
            width = width if 1 + share * (tokens - 1) > among[width] else 1
        return width, among

    def _held(self, num_rows: int, alone: dict[int, float]) -> int:
        """The width of a step with prompts; where these lose what others would gain, none is a round."""
        among = self._ratios_of(num_rows, has_prompts=True)
        best, gain = self._best_among_prompts(alone, among, (1 - self._share) * self._costs.to_catch_up(num_rows))
        gain = self._share * gain + (1 - self._share) * (self._tokens(self._width) - alone[self._width])
        self._is_held = gain <= (_HELD_MARGIN if self._is_held else 0.0)
        if self._is_held:
            self._width = best = 1
        return best

    def _begun(self, num_rows: int, alone: dict[int, float]) -> int:
        """The width of a step without prompts. Where the number of rows changes, so may what pays: as often as rounds
        begin, the drafter has to catch up."""
        width, before, self._is_wanted = self._width, self._is_wanted, self._width > 1
        if width == 1:
            return 1
        self._begins += _START_WEIGHT * ((not before) - self._begins)
        is_gain = self._tokens(width) - alone[width] > self._begins * self._costs.to_catch_up(num_rows)
        return width if is_gain else 1

    def _tokens(self, width: int) -> float:
        return self._use.tokens(self._acceptance, width)

    def _ratios_of(self, num_rows: int, *, has_prompts: bool) -> dict[int, float]:
        found = self._ratios.get((num_rows, has_prompts))
        if found is None:
            ratio = self._costs.ratio_among_prompts if has_prompts else self._costs.ratio
            found = {width: ratio(num_rows, width) for width in (*self._costs.widths, 1)}
            self._ratios[num_rows, has_prompts] = found
        return found

    def _best(self, ratios: dict[int, float]) -> int:
        """The width that brings most for its time; the one that is in use wins by a margin."""

        def rate(width: int) -> float:
            return self._tokens(width) / ratios[width]

        best = max(ratios, key=rate)
        return best if rate(best) > rate(self._width) * _MARGIN else self._width

    def _best_among_prompts(
        self, alone: dict[int, float], among: dict[int, float], after_plain: float
    ) -> tuple[int, float]:
        """The width by which a step with prompts saves most of the time that its tokens would take in steps without,
        less what it takes itself; and what is gained by it over plain steps everywhere, in their time.

        A plain one costs what the drafter does before the next round, as often as a step without prompts comes next.
        """
        more = {width: self._tokens(width) - 1 for width in among}
        each = min(alone[width] / (1 + more[width]) for width in alone)
        costs = {width: ratio - 1 for width, ratio in among.items()} | {1: after_plain}
        best = max(costs, key=lambda width: more[width] * each - costs[width])
        return best, more[best] - costs[best]

    def _plain(self, ratios: dict[int, float], num_rows: int) -> Planned:
        """A plain step, before which drafts are made now and then; not where the last ones are of fewer places, nor
        where no round could pay, nor where those without prompts do: these tell as much."""
        self._wide_left, self._num_since = 0, self._num_since + 1
        price = _LAUNCH_PRICE + self._costs.to_catch_up(num_rows)
        if price > _DEAREST or not any(ratio < width for width, ratio in ratios.items() if width > 1):
            return Planned(1)
        is_due = self._num_since > self._apart and self._last == self._width == 1
        if not self._pays(price, ratios[1], stake_of(num_rows), is_due=is_due):
            return Planned(1)
        self._num_since = 0
        return Planned(1, probes=True)

    def _round(self, width: int, ratios: dict[int, float], stake: float) -> Planned:
        """A round of this width, or now and then some of the widest, to see what these bring by now."""
        own, widest = ratios[width], self._costs.widths[0]
        extra = max(_LEAST_EXTRA, ratios[widest] - own)
        can_look = width < widest and ratios[widest] < widest
        if not self._wide_left and can_look and self._pays(_WIDE_ROUNDS * extra, own, stake):
            self._acceptance.forget()
            self._wide_left, self._wide_paid = _WIDE_ROUNDS, extra
        # Meanwhile rows may have come, for which wide rounds cost more than was paid.
        if not self._wide_left or not can_look or extra > self._wide_paid * _MARGIN:
            self._wide_left = 0
            return Planned(width)
        self._wide_left -= 1
        return Planned(widest)

    def _pays(self, price: float, step: float, stake: float, *, is_due: bool = True) -> bool:
        """Pay for a probe, if it is due and there is credit, which grows with every step by its time.

        What is dearer than the stake is saved for apart, so that cheaper ones, of more rows or fewer, don't take it; if
        it is the first of all, it is made at once.
        """
        earned = _PROBE_SHARE * stake * step
        if price <= stake:
            self._credit = min(stake, self._credit + earned)
            has_credit = self._credit >= price
        else:
            self._saved = min(price, self._saved + earned)
            has_credit = self._saved >= price or self._is_first
        if not has_credit or not is_due:
            return False
        if price <= stake:
            self._credit -= price
        else:
            self._saved = 0.0
            self._credit = 0.0 if self._is_first else self._credit
        self._is_first = False
        return True

    def took(self, step: ScheduledStep, updates: Collection[Update], probed: Collection[Counter[Brought]]) -> None:
        """Of rounds that a limit on the output cut off it is known that they would have brought so much at least; those
        with a stop token are left out."""
        if not step.decodes:
            return
        width, depth = step.tokens_per_row, self._acceptance.depth
        for counts in probed:
            self._acceptance.note_probe(counts)
        found = _decoded(step, updates)
        num_tokens = sum([len(tokens) for _, tokens, _ in found])
        self._use.took(step.decodes, num_tokens)
        counts = Counter[Brought](_brought(found, width, depth)) if width > 1 else Counter[Brought]()
        self._acceptance.note(width, counts, catches_up=step.catches_up)
        if counts and width <= self._width:
            mean = self._acceptance.tokens(width)
            cut_off = sum([max(0.0, mean - len(tokens)) for _, tokens, finish in found if finish is not None])
            ratio = self._costs.ratio_among_prompts if step.prefills else self._costs.ratio
            self._note_gain((num_tokens + cut_off) / len(found) - ratio(len(step.decodes), width))

    def _note_gain(self, gained: float) -> None:
        """What a round gained; where rounds that were to pay lose for a while, all that is known of them is given up.

        Probes pay for what was lost so and was not won before: a drafter that is right in probes alone gets few.
        """
        self._won = min(_MOST_WON, self._won + gained)
        self._lost = max(0.0, self._lost - gained)
        if self._lost > _STREAK:
            self._acceptance.give_up()
            debt = max(0.0, -self._won)
            self._credit, self._saved = self._credit - debt, self._saved - debt
            self._width, self._lost, self._won = 1, 0.0, 0.0

    def __str__(self) -> str:
        costs, most = self._costs, _DEAREST - _LAUNCH_PRICE
        dear = [f"{costs.sizes[at]}" for at in costs.told() if costs.to_catch_up(costs.sizes[at]) > most]
        where = "at any size, so no round is run" if len(dear) == len(costs.told()) else f"at {', '.join(dear)}"
        rows = f"not probed {where}: drafting alone takes over {most:.1f} plain steps"
        return f"where that pays (a round costs, by rows: {costs}{f'; {rows}' if dear else ''})"


def _ending(prompts: Collection[Prompt]) -> list[Sequence]:
    """The sequences whose prompts may end in a step with these."""
    return [one.sequence if isinstance(one, Chunk) else one for one in prompts]


def _decoded(step: ScheduledStep, updates: Collection[Update]) -> Collection[Update]:
    """What rows that decoded got."""
    if not step.prefills:
        return updates
    decoding = set(step.decodes)
    return [update for update in updates if update[0] in decoding]


def _brought(found: Iterable[Update], width: int, depth: int) -> Iterator[Brought]:
    """What each row that takes drafts got, and went on, or was cut off by a limit: of its outputs, or of its drafts."""
    for sequence, tokens, finish in found:
        if finish is None or finish is FinishReason.LENGTH:
            count, most = len(tokens), sequence.draft_depth(depth) if sequence.is_draft_bounded else depth
            if most:
                yield count, finish is not None or count == most + 1 < width


def width_by(limits: Limits, costs: StepCosts | None) -> StepWidth:
    """The policy: by the measured cost of rounds, where that is known."""
    return WhereDrafted(limits) if costs is None else WherePaid(limits, costs)
