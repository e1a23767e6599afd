"""Scheduler: decides what each step computes, by counts alone, and what becomes of the tokens when they arrive."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from phonograph.engine.cache.rows import Rows
from phonograph.engine.passes.registry import StepPasses
from phonograph.engine.requests.limits import Limits, fewest_of
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence, State
from phonograph.engine.requests.step import Chunk, Sampled, ScheduledStep, Update, problem_at
from phonograph.engine.scheduling.admission import sequences_of
from phonograph.engine.scheduling.catching_up import CatchingUp
from phonograph.engine.scheduling.counts import Counts, Totals
from phonograph.engine.scheduling.decode_set import DecodeSet
from phonograph.engine.scheduling.queue import WaitingQueue
from phonograph.engine.scheduling.step_budget import StepBudget
from phonograph.engine.scheduling.step_width import Planned, StepWidth, WhereDrafted
from phonograph.errors import PhonographError, RequestError

_MAX_PREFILL_STREAK = 8
"""Without mixed steps: prefill steps that may follow each other while decodes wait."""


class Scheduler:
    """Plans steps over rows and pages; `commit` follows `schedule` in the same order, up to `max_ahead` steps later.

    Rank (see `WaitingQueue`) decides who is admitted first and who is preempted last. Admission gives all pages of the
    known tokens, or waits at the head of the queue; only a decode without a page preempts. None is preempted while
    one lower in rank runs, and the pool suffices for any one sequence: so the first finishes, and by induction all do.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        prefix_cache: bool = True,
        mixed: bool = True,
        passes: StepPasses = StepPasses(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.rows = Rows(limits, prefix_cache=prefix_cache)
        self.shares_prompts = prefix_cache
        self.passes, self._mixed, self._clock = passes, mixed, clock
        self.width: StepWidth = WhereDrafted(limits)
        self._catching_up, self._live = CatchingUp(limits), dict[str, list[Sequence]]()
        self._followers: dict[Sequence, list[Sequence]] = {}
        """Siblings (n > 1), waiting until the first of their request has computed the prompt, which they then share."""
        self._waiting = WaitingQueue(limits.patience)
        self._prefills: list[Sequence] = []
        self._decodes = DecodeSet(limits, self.rows)
        self._in_flight: deque[ScheduledStep] = deque()
        self._launched = self._committed = self._serial = self._prefill_streak = 0
        self._next_deadline = math.inf
        self._totals = Totals()

    # -- the life of a request ------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; one that can never be served is refused."""
        if request.id in self._live:
            problem = "this id is being served already. Give every request its own."
            raise RequestError(f"request {request.id!r}: {problem}", field="id")
        sequences = sequences_of(request, self.limits, self._serial)
        self._serial += len(sequences)
        for sequence in sequences:
            self._waiting.watch(sequence, self._launched)
        self._live[request.id] = sequences
        shares = self.shares_prompts and len(request.prompt) > self.limits.page_size
        shares |= not sequences[0].is_scored  # and the scores
        first, followers = (sequences[:1], sequences[1:]) if shares else (sequences, [])
        if followers:
            self._followers[sequences[0]] = followers
        self._waiting_again(first)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        return list(sequences)

    def cancel(self, request_id: str) -> list[Update]:
        """End all sequences of a request; one that is not being served (any more) brings no update."""
        return self._end(self._live.get(request_id, ()), FinishReason.CANCELLED)

    def expire(self, now: float | None = None) -> list[Update]:
        """End what is past its deadline; `commit` does it too."""
        now = self._clock() if now is None else now
        if now < self._next_deadline:
            return []
        waits = [(s[0].request.deadline, s) for s in self._live.values() if s[0].request.deadline is not None]
        self._next_deadline = min((deadline for deadline, _ in waits if deadline > now), default=math.inf)
        late = [sequence for deadline, sequences in waits if deadline <= now for sequence in sequences]
        return self._end(late, FinishReason.DEADLINE)

    def fail(self, sequence: Sequence, message: str, field: str = "") -> list[Update]:
        """End a sequence with an error, for a field of its request if one is named; what its steps wrote is lost."""
        if sequence.finish is None:
            sequence.error, sequence.error_field = message, field or sequence.error_field
        return self._end((sequence,), FinishReason.ERROR)

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[Update]:
        """End a sequence for a reason that lies outside, as a stop text that was found."""
        return self._end((sequence,), reason)

    def _end(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[Update]:
        updates: list[Update] = []
        for sequence in tuple(sequences):
            if sequence.finish is None:
                self._close(sequence, reason)
                updates.append((sequence, (), reason))
        return updates

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish, sequence.state = reason, State.FINISHED
        self._decodes.unsettle()
        self._waiting.discard(sequence)
        self._waiting_again(self._followers.pop(sequence, ()))
        if sequence.row:
            self.rows.leave(sequence, self._committed)
        siblings = self._live[sequence.request.id]
        # From the end, each once: to look at all siblings whenever one ends is quadratic in n.
        while siblings and siblings[-1].finish is not None:
            siblings.pop()
        if not siblings:
            del self._live[sequence.request.id]

    # -- launch ---------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step to launch, or None if there is nothing to do before a commit or a new request.

        Advances the counts of all that take part, so a step that was handed out must be launched, and then committed.
        """
        if len(self._in_flight) > self.limits.max_ahead:
            return None
        self._waiting.age(self._launched)
        if self._mixed:
            decodes = self._plan_decodes()
            planned = self.width.of(decodes, self._may_prefill()) if decodes else Planned(1)
            chunks = self._plan_prefills(len(decodes), planned.width)
        else:
            decodes, chunks = self._plan_pure()
        if not decodes and not chunks:
            return None
        self._launched = number = self._launched + 1
        most, probes = planned if self._mixed and decodes else self.width.of(decodes, chunks)
        fewest, reads = fewest_of(most), self._catching_up.is_due(most, decodes, probes=probes)
        for sequence in decodes:
            sequence.num_computed += most
            sequence.num_launched_outputs += fewest
            sequence.last_step = number
        name, pages = self.passes.with_prefills(chunks) if chunks else self.passes.decodes, self.rows.page_updates()
        step = ScheduledStep(
            number, decodes, tuple(chunks), pages, most, pass_name=name, catches_up=reads, probes=probes
        )
        self._in_flight.append(step)
        return step

    def _plan_pure(self) -> tuple[tuple[Sequence, ...], list[Chunk]]:
        """Prefills or decodes, never both: prefills first, but not forever."""
        chunks = self._plan_prefills() if self._prefill_streak < _MAX_PREFILL_STREAK else []
        decodes = () if chunks else self._plan_decodes()
        if not chunks and not decodes:
            # Decodes that were preempted just now have left room.
            chunks = self._plan_prefills()
        self._prefill_streak = self._prefill_streak + 1 if chunks else 0
        return decodes, chunks

    def _plan_decodes(self) -> tuple[Sequence, ...]:
        if not self._decodes.is_settled:
            self._make_room(self._decodes.provide(self._committed))
            self._decodes.settle(self._committed)
        return self._decodes.take()

    def _make_room(self, needy: list[Sequence]) -> None:
        """Preempt, last in rank first, until these have the pages that they need, or some are on their way back.

        Not for one that may turn out to need none: the commit of its step in flight will tell.
        """
        exact = self.limits.tokens_per_row == self.limits.fewest_per_row
        for sequence in needy:
            if not exact and sequence.last_step > self._committed:
                continue
            while sequence.state is State.RUNNING and not self.rows.extend(sequence):
                if self.rows.leaving:
                    return
                running = (other for other in (*self._decodes, *self._prefills) if other.state is State.RUNNING)
                self._preempt(max(running, key=lambda other: other.rank))

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to the queue; it will be computed again from its prompt and its outputs."""
        self._totals.preemptions += 1
        sequence.state = State.WAITING
        if self.rows.leave(sequence, self._committed):
            self._waiting.push(sequence)

    def _may_prefill(self) -> Many[Sequence]:
        """Sequences of whose prompts a step may have some: those that have a row, or the head of the queue."""
        if started := [sequence for sequence in self._prefills if sequence.state is State.RUNNING]:
            return started
        if self._decodes.is_short or not self.rows.has_free:
            return ()
        head = self._waiting.admissible(self.rows.num_changes)
        return () if head is None else (head,)

    def _plan_prefills(self, num_decodes: int = 0, width: int = 1) -> list[Chunk]:
        """Go on with prefills that have a row, then admit from the queue, as far as a step with these decodes goes."""
        if not self._prefills and not self._waiting:
            return []
        self._prefills = [sequence for sequence in self._prefills if sequence.state is State.RUNNING]
        budget = StepBudget(self.limits, num_decodes, width, len(self._prefills) + len(self._waiting))
        chunks = [self._next_chunk(sequence, budget) for sequence in self._prefills if budget.room(sequence) > 0]
        while budget.tokens > 0 and (admitted := self._admit(budget)) is not None:
            chunks.append(self._next_chunk(admitted, budget, enters=True))
        if chunks:
            self._prefills = [sequence for sequence in self._prefills if sequence.is_prefilling]
        return chunks

    def _admit(self, budget: StepBudget) -> Sequence | None:
        """Admit the head of the queue, if there is a row, and pages once every decode has its own; no one overtakes."""
        if self._decodes.is_short or not self.rows.has_free:
            return None
        sequence = self._waiting.admissible(self.rows.num_changes)
        if sequence is None or budget.room(sequence) <= 0:
            return None
        if not self.rows.seat(sequence):
            self._waiting.block(sequence, self.rows.num_changes)
            return None
        self._waiting.discard(sequence)
        self._prefills.append(sequence)
        is_looked_for = sequence.request.pooling is None and not sequence.places_per_token
        self._totals.prefix_lookup_tokens += sequence.prefill_end if is_looked_for else 0
        self._totals.prefix_hit_tokens += sequence.num_computed
        if not sequence.last_step:
            sequence.num_cached = sequence.num_computed
            self._totals.prompt_tokens += sequence.num_prompt if sequence.index == 0 else 0
        sequence.state = State.RUNNING
        return sequence

    def _next_chunk(self, sequence: Sequence, budget: StepBudget, *, enters: bool = False) -> Chunk:
        start = sequence.num_computed
        stop = min(start + min(budget.room(sequence), self.limits.max_chunk), sequence.prefill_end)
        sequence.num_computed = stop
        sequence.last_step = self._launched + 1
        self._totals.prefill_tokens += stop - start
        samples = stop == sequence.prefill_end and sequence.max_outputs > 0
        if samples:
            sequence.num_launched_outputs += 1
            self._decodes.join(sequence)
        return budget.spent_on(Chunk.of(sequence, start, stop, samples=samples, enters=enters))

    # -- commit ---------------------------------------------------------------------------------------------------

    def commit(self, step: ScheduledStep, sampled: Sampled, now: float | None = None) -> list[Update]:
        """Take in the tokens that a step sampled for each of `step.sampling`, and free what is no longer used.

        Tokens of a sequence that ended meanwhile are dropped, so what was launched ahead in vain is never seen, and so
        are those after its end. Where a problem comes instead of a token, the sequence fails.
        """
        self._check_order(step)
        sampled.check(step)
        self._in_flight.popleft()
        self._committed = step.number
        is_plain = sampled.counts is None and step.tokens_per_row == 1
        updates = self._take_one_each(step, sampled) if is_plain else self._take_several(step, sampled)
        for chunk in step.prefills:
            if chunk.samples:
                self._share_prompt(chunk)
            elif chunk.is_end:
                updates += self.finish(chunk.sequence, FinishReason.LENGTH)
        updates += self.expire(now)
        self._waiting_again(self.rows.retire(self._committed))
        return updates

    def _waiting_again(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish is None:
                self._waiting.push(sequence)

    def drop(self, step: ScheduledStep) -> None:
        """Drop a step whose results are wrong; there must be no other in flight.

        All running sequences go back to the queue, in the step or not, and are computed again from their prompts and
        committed tokens; the prefix cache is dropped: the same recording may have written any page, now or before.
        """
        self._check_order(step)
        if len(self._in_flight) > 1:
            raise PhonographError(f"dropping step {step.number}: others were launched after it. Commit one at a time.")
        self._in_flight.popleft()
        self._committed = step.number
        for sequence in dict.fromkeys((*step.sequences, *self._decodes, *self._prefills)):
            if sequence.state is State.RUNNING:
                self._totals.preemptions += 1
                sequence.state = State.WAITING
                self.rows.forget(sequence)
                self._waiting.push(sequence)
        self._decodes.drop_idle()
        self._prefills.clear()
        self._waiting_again(self.rows.retire(self._committed))
        self.rows.reservations.prefixes.clear()

    def _take_one_each(self, step: ScheduledStep, sampled: Sampled) -> list[Update]:
        """What `_take_several` does, for plain steps: so many of them come that each line counts."""
        updates: list[Update] = []
        failed: list[Update] = []
        for sequence, token in zip(step.sampling, sampled.tokens, strict=True):
            if sequence.finish is not None:
                continue
            if token < 0:
                failed += self.fail(sequence, *problem_at(token, sequence))
                continue
            outputs = sequence.outputs
            outputs.append(token)
            if token in sequence.stop_ids:
                self._close(sequence, FinishReason.STOP)
            elif len(outputs) >= sequence.max_outputs:
                self._close(sequence, FinishReason.LENGTH)
            updates.append((sequence, (token,), sequence.finish))
        self._totals.generated_tokens += len(updates)
        return updates + failed

    def _take_several(self, step: ScheduledStep, sampled: Sampled) -> list[Update]:
        """Correct the counts by what the device took, then append what the sequence takes of it."""
        updates, failed, decodes = list[Update](), list[Update](), len(step.decodes)
        width, fewest, tokens, end = step.tokens_per_row, fewest_of(step.tokens_per_row), sampled.tokens, 0
        has_problem, least_left = min(tokens, default=0) < 0, self.limits.max_len
        for sequence, count in zip(step.sampling, sampled.counts or (1,) * len(tokens), strict=True):
            first, end = end, end + count
            if decodes:
                # Before any sequence is closed, and of those that are: what the prefix cache keeps goes by this count.
                decodes -= 1
                sequence.num_computed -= width - count
                sequence.num_launched_outputs += count - fewest
            if sequence.finish is not None:
                continue
            least_left = min(least_left, sequence.max_outputs - sequence.num_launched_outputs)
            taken, outputs, finish, problem = tokens[first:end], sequence.outputs, None, 0
            goes_on = len(outputs) + count < sequence.max_outputs and sequence.stop_ids.isdisjoint(taken)
            if goes_on and not has_problem:  # as nearly all do, so that each line counts
                outputs += taken
            else:
                taken, finish, problem = sequence.take(taken)
            if finish is not None:
                self._close(sequence, finish)
            if taken:
                updates.append((sequence, tuple(taken), finish))
            if problem:
                failed += self.fail(sequence, *problem_at(problem, sequence))
        self._decodes.settle_for(least_left)
        self._totals.generated_tokens += sum(len(taken) for _, taken, _ in updates)
        return updates + failed

    def _check_order(self, step: ScheduledStep) -> None:
        if not self._in_flight or self._in_flight[0] is not step:
            numbers = [launched.number for launched in self._in_flight]
            raise PhonographError(
                f"committing step {step.number}: the steps in flight are {numbers}. Commit each once, in launch order."
            )

    def _share_prompt(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if sequence.row and sequence.finish is not FinishReason.ERROR:
            self.rows.keep(sequence, chunk.start + chunk.count)
        self._waiting_again(self._followers.pop(sequence, ()))

    # -- what it knows --------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being served and nothing is in flight."""
        return not self._live and not self._in_flight

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not committed."""
        return len(self._in_flight)

    @property
    def counts(self) -> Counts:
        live = (sequence for sequences in self._live.values() for sequence in sequences)
        return Counts.of(live, self.rows.reservations, self._launched, self._totals)

    def integrity(self) -> None:
        """Raise if a row, page or sequence is lost; when idle, each row must be free and each page free or cached."""
        self.rows.check()
        if self.is_idle and not self.rows.is_empty:
            raise PhonographError("integrity: no request is left, but rows are taken.")
        placed = {*self._prefills, *self._decodes, *self.rows.leaving, *self._waiting}
        placed.update(chunk.sequence for step in self._in_flight for chunk in step.prefills if chunk.is_end)
        placed.update(follower for followers in self._followers.values() for follower in followers)
        live = [sequence for sequences in self._live.values() for sequence in sequences]
        lost = [sequence for sequence in live if sequence.finish is None and sequence not in placed]
        if lost:
            raise PhonographError(f"integrity: sequences that are in no queue and in no step: {lost}.")
