"""Properties of the scheduler, on a simulated device whose KV pages remember what was written to them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.prompt_scoring import take_scores
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import PromptDetails, Sampled, ScheduledStep, Update
from phonograph.engine.scheduling.scheduler import Scheduler

VOCAB = 11
REJECTED = -9
"""What a device wrote for a token that it then did not accept."""
NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


def next_token(context: tuple[int, ...], index: int) -> int:
    """The model: a token depends on all tokens before it, and on which of a request's sequences it is for."""
    return hash((index, *context)) % VOCAB


def expected(sequence: Sequence, limits: Limits) -> tuple[list[int], FinishReason]:
    """What one sequence alone gives, with no batch, page or step in sight."""
    request, params = sequence.request, sequence.request.params
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_ids)}
    longest = min(limits.max_len, (limits.num_pages - 1) * limits.page_size + 1)
    outputs: list[int] = []
    if params.max_tokens == 0:
        return outputs, FinishReason.LENGTH
    while True:
        outputs.append(next_token(request.prompt + tuple(outputs), sequence.index))
        if outputs[-1] in stop_ids:
            return outputs, FinishReason.STOP
        if len(outputs) == params.max_tokens or len(request.prompt) + len(outputs) == longest:
            return outputs, FinishReason.LENGTH


@dataclass
class Row:
    """A row of the device tables."""

    length: int
    last_token: int = -1
    pages: dict[int, int] = field(default_factory=dict)


@dataclass
class Flight:
    """A launched step, the tokens that it will give, and the pages that it touches."""

    step: ScheduledStep
    tokens: list[int]
    counts: list[int]
    written: dict[int, Sequence]
    read: dict[int, set[Sequence]]


class SimulatedDevice:
    """Runs steps at once, but its tokens are known only when they are committed.

    Where a row may have several tokens in a step, how many it has is drawn; those that it has not got were computed and
    written all the same. With `clamps` no row goes past its last output; without, what it puts out there is nonsense.
    """

    def __init__(self, limits: Limits, seed: int = 0, *, clamps: bool = True) -> None:
        self.limits = limits
        self.random = random.Random(seed)
        self.clamps = clamps
        self.rows: dict[int, Row] = {}
        self.pages: dict[int, dict[int, tuple[int, int]]] = {page: {} for page in range(limits.num_pages)}
        self.in_flight: deque[Flight] = deque()

    def launch(self, step: ScheduledStep) -> None:
        flight = Flight(step, [], [], {}, {})
        for chunk in step.new_rows:
            self.rows[chunk.sequence.row] = Row(chunk.start)
        assert len({update[:2] for update in step.page_updates}) == len(step.page_updates)
        for row, index, page in step.page_updates:
            self.rows[row].pages[index] = page
        for sequence in step.decodes:
            self._decode(flight, sequence, step.tokens_per_row)
        for chunk in step.prefills:
            prompted = self.rows[chunk.sequence.row]
            assert prompted.length == chunk.start
            self._write(flight, chunk.sequence, chunk.tokens)
            prompted.length += chunk.count
            if chunk.samples:
                prompted.last_token = next_token(self._read(flight, chunk.sequence), chunk.sequence.index)
                flight.tokens.append(prompted.last_token)
                flight.counts.append(1)
        self._check_apart(flight)
        self.in_flight.append(flight)

    def _decode(self, flight: Flight, sequence: Sequence, most: int) -> None:
        row = self.rows[sequence.row]
        count = 1 if most == 1 else self.random.randint(0, most)
        left = max(0, sequence.num_prompt + sequence.max_outputs - row.length - 1)
        real = min(count, left)
        tokens = list(self._read(flight, sequence)) if left else []
        before = len(tokens)
        for _ in range(real):
            tokens.append(row.last_token if len(tokens) == before else flight.tokens[-1])
            flight.tokens.append(next_token(tuple(tokens), sequence.index))
        computed = (row.last_token, *(flight.tokens[len(flight.tokens) - real :][:-1] if real else ()))
        self._write(flight, sequence, (*computed, *[REJECTED] * (most - len(computed))))
        row.last_token = flight.tokens[-1] if real else row.last_token
        if not self.clamps:
            flight.tokens += [REJECTED % VOCAB] * (count - real)
            real = count
        row.length += real
        flight.counts.append(real)

    def _write(self, flight: Flight, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Write from the row's length on; past the pages that a sequence can need, to the null page."""
        row = self.rows[sequence.row]
        for position, token in enumerate(tokens, row.length):
            index, place = divmod(position, self.limits.page_size)
            page = row.pages.get(index, 0)
            assert page != 0 or position >= sequence.max_computed
            assert page == 0 or flight.written.setdefault(page, sequence) is sequence
            self.pages[page][place] = (token, position)

    def _read(self, flight: Flight, sequence: Sequence) -> tuple[int, ...]:
        """The tokens in the sequence's pages, which must be its own."""
        row = self.rows[sequence.row]
        context: list[int] = []
        for position in range(row.length):
            index, place = divmod(position, self.limits.page_size)
            page = row.pages[index]
            flight.read.setdefault(page, set()).add(sequence)
            token, written_for = self.pages[page][place]
            assert written_for == position
            context.append(token)
        known = sequence.known()
        assert tuple(context[: len(known)]) == known[: len(context)]
        for position in range(sequence.num_prompt, len(context)):
            assert context[position] == next_token(tuple(context[:position]), sequence.index)
        return tuple(context)

    def _check_apart(self, flight: Flight) -> None:
        """No sequence writes what another one reads or writes in a step that may be running."""
        for other in (flight, *self.in_flight):
            for page, writer in flight.written.items():
                assert other.written.get(page, writer) is writer
                assert other.read.get(page, {writer}) == {writer}
            for page, readers in flight.read.items():
                assert page not in other.written or readers == {other.written[page]}


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and what happens to it later."""

    tick: int
    request: Request
    fate: str
    """none, cancel, fail or finish"""
    fate_tick: int


class Simulation:
    """Drives scheduler and device through random arrivals and a random lag of commits, and checks every step."""

    def __init__(self, limits: Limits, arrivals: list[Arrival], *, seed: int, prefix_cache: bool, mixed: bool) -> None:
        self.limits = limits
        self.now = 0
        self.scheduler = Scheduler(limits, prefix_cache=prefix_cache, mixed=mixed, clock=lambda: float(self.now))
        self.device = SimulatedDevice(limits, seed, clamps=seed % 2 == 0)
        self.arrivals = arrivals
        self.fates = {arrival.request.id: arrival.fate for arrival in arrivals}
        self.random = random.Random(seed)
        self.sequences: dict[str, list[Sequence]] = {}
        self.told: dict[Sequence, list[int]] = {}
        self.finished: dict[Sequence, FinishReason] = {}

    def run(self, max_ticks: int) -> int:
        """Until nothing is left to do; returns the number of ticks."""
        last = max((max(arrival.tick, arrival.fate_tick) for arrival in self.arrivals), default=0)
        while self.now <= last or not self.scheduler.is_idle:
            assert self.now <= max_ticks, f"still running: {self.scheduler.counts}"
            self.tick()
        return self.now

    def tick(self) -> None:
        self._meet_fates()
        launched = self._launch() if self.random.random() < 0.7 else False
        if self.device.in_flight and (not launched or self.random.random() < 0.3):
            self._commit()
        self.scheduler.integrity()
        self.now += 1

    def _meet_fates(self) -> None:
        for arrival in self.arrivals:
            name = arrival.request.id
            if arrival.tick == self.now:
                self.sequences[name] = self.scheduler.add(arrival.request)
                self.told.update((sequence, []) for sequence in self.sequences[name])
            if arrival.fate_tick == self.now and name in self.sequences:
                self._take(list(self._end(arrival.fate, self.sequences[name])))
        if self.random.random() < 0.3:
            self._take(self.scheduler.expire())

    def _end(self, fate: str, sequences: list[Sequence]) -> Iterator[Update]:
        if fate == "cancel":
            yield from self.scheduler.cancel(sequences[0].request.id)
        elif fate == "fail":
            yield from self.scheduler.fail(sequences[0], "the device said no")
        elif fate == "finish":
            yield from self.scheduler.finish(sequences[-1], FinishReason.STOP)

    def _launch(self) -> bool:
        in_flight = self.scheduler.num_in_flight
        step = self.scheduler.schedule()
        if step is None:
            assert in_flight or not any(s.finish is None for all_ in self.sequences.values() for s in all_), "deadlock"
            return False
        assert in_flight <= self.limits.max_ahead
        self._check_step(step)
        self.device.launch(step)
        return True

    def _check_step(self, step: ScheduledStep) -> None:
        limits = self.limits
        assert 0 < step.num_tokens <= limits.max_tokens
        assert step.num_seqs <= limits.max_seqs
        assert len({sequence.row for sequence in step.sequences}) == step.num_seqs
        assert all(1 <= sequence.row <= limits.max_seqs for sequence in step.sequences)
        assert all(1 <= chunk.count <= limits.max_chunk for chunk in step.prefills)
        scored, sampled = sum(len(chunk.targets) for chunk in step.prefills), len(step.prefills)
        assert scored + sampled + len(step.decodes) * step.tokens_per_row <= limits.num_places
        for sequence in step.decodes:
            sampled = any(sequence in flight.step.sampling for flight in self.device.in_flight)
            assert sequence.request.run_ahead or not sampled
        held = {page for sequence in self.told for page in sequence.pages}
        assert self.scheduler.counts.used_pages == len(held)
        for sequence in step.sequences:
            assert sequence.finish is None
            assert sequence.num_launched_outputs <= sequence.max_outputs
            for page in sequence.pages[(sequence.num_computed - 1) // limits.page_size + 1 :]:
                assert self.scheduler.rows.reservations.pool.references(page) == 1

    def _commit(self) -> None:
        flight = self.device.in_flight.popleft()
        counts = None if self.limits.tokens_per_row == 1 else flight.counts
        scores: list[PromptDetails] = [(-1.0, [t], [-1.0], 1) for one in flight.step.prefills for t in one.targets]
        sampled = Sampled(flight.tokens, counts, scores=scores or None)
        assert not take_scores(flight.step, sampled)[1]
        self._take(self.scheduler.commit(flight.step, sampled))
        self.check_cache()
        if not self.device.in_flight and self.device.clamps:
            for sequence in self.told:
                assert not sequence.row or sequence.num_computed == self.device.rows[sequence.row].length

    def check_cache(self) -> None:
        """What the prefix cache says of a page is what was written to it."""
        size = self.limits.page_size
        for page, edge in self.scheduler.rows.reservations.prefixes._edges.items():
            tokens = list(memoryview(edge[4:]).cast("q"))
            assert [self.device.pages[page][place][0] for place in range(size)] == tokens

    def _take(self, updates: list[Update]) -> None:
        for sequence, new_tokens, finish in updates:
            assert sequence not in self.finished, "an update after the end"
            self.told[sequence] += new_tokens
            if finish is not None:
                self.finished[sequence] = finish

    def check_outcome(self) -> None:
        ended_by_us = {sequence for sequence in self.told if self.fates[sequence.request.id] == "finish"}
        for sequence, told in self.told.items():
            assert told == sequence.outputs
            tokens, finish = expected(sequence, self.limits)
            assert told == tokens[: len(told)]
            if self.finished[sequence] in NATURAL and sequence not in ended_by_us:
                assert (told, self.finished[sequence]) == (tokens, finish)
                assert sequence.is_scored
            if sequence.index == 0 and sequence.request.params.prompt_logprobs is not None:
                scores = [one.token for one in sequence.prompt_logprobs]
                assert tuple(scores) == sequence.request.prompt[1 : len(scores) + 1]
        pool, counts = self.scheduler.rows.reservations.pool, self.scheduler.counts
        assert pool.num_held == counts.cached_pages
        assert (counts.used_pages, counts.generated_tokens) == (0, sum(map(len, self.told.values())))


LIMITS = st.builds(
    lambda seqs, more_tokens, max_len, page_size, more_pages, reserve, ahead, chunk, patience, eos, per_row, places: (
        Limits(
            max_seqs=seqs,
            max_tokens=seqs * per_row + more_tokens,
            max_len=max_len,
            page_size=page_size,
            num_pages=2 + more_pages,
            reserve_tokens=reserve,
            max_ahead=ahead,
            chunk=chunk,
            patience=patience,
            eos_ids=eos,
            tokens_per_row=per_row,
            scored_places=places,
        )
    ),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(8, 40),
    st.integers(1, 5),
    st.integers(4, 20),
    st.integers(0, 9),
    st.integers(0, 3),
    st.none() | st.integers(1, 6),
    st.sampled_from([3, 30, 1000]),
    st.sampled_from([(), (), (0,)]),
    st.just(1) | st.integers(1, 7),
    st.sampled_from([1, 4, 64]),
)


@st.composite
def arrivals(draw: st.DrawFn, limits: Limits) -> list[Arrival]:
    longest = min(limits.max_len - 1, limits.capacity)
    found = []
    for number in range(draw(st.integers(1, 12))):
        tick = draw(st.integers(0, 5) | st.integers(0, 30))
        start = draw(st.integers(0, 1))
        params = SamplingParams(
            max_tokens=draw(st.integers(0, 8) | st.integers(8, 30)),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            stop_token_ids=draw(st.sampled_from([(), (), (), (3,)])),
            ignore_eos=draw(st.booleans()),
        )
        request = Request(
            id=f"r{number}",
            prompt=tuple(range(start, start + draw(st.integers(1, longest) | st.integers(1, min(longest, 8))))),
            params=params,
            priority=draw(st.integers(-1, 1)),
            deadline=draw(st.sampled_from([None, None, None, None, None, tick, tick + 20])),
            arrival=float(tick),
            run_ahead=draw(st.sampled_from([True, True, True, False])),
        )
        fate = draw(st.sampled_from(["none", "none", "none", "none", "cancel", "fail", "finish"]))
        found.append(Arrival(tick, request, fate, tick + draw(st.integers(0, 40))))
    return found


@settings(max_examples=400, deadline=None)
@given(
    LIMITS.flatmap(lambda limits: st.tuples(st.just(limits), arrivals(limits))),
    st.integers(),
    st.booleans(),
    st.booleans(),
)
def test_tokens_are_those_of_one_sequence_alone_and_nothing_is_lost(
    case: tuple[Limits, list[Arrival]], seed: int, prefix_cache: bool, mixed: bool
) -> None:
    limits, requests = case
    simulation = Simulation(limits, requests, seed=seed, prefix_cache=prefix_cache, mixed=mixed)
    work = sum((len(a.request.prompt) + a.request.params.max_tokens) * a.request.params.n for a in requests)
    # Rows that may have none in a step take longer.
    simulation.run(max_ticks=200 + (3 if limits.tokens_per_row == 1 else 9) * work)
    simulation.check_outcome()


@settings(max_examples=40, deadline=None)
@given(LIMITS, st.integers(), st.booleans(), st.booleans())
def test_an_endless_stream_of_urgent_requests_starves_nobody(
    limits: Limits, seed: int, prefix_cache: bool, mixed: bool
) -> None:
    limits = replace(limits, patience=10, chunk=None, eos_ids=())
    longest = min(limits.max_len - 1, limits.capacity, 5)
    prompts = [tuple(range(number, number + longest)) for number in range(300)]
    humble = Request("humble", prompts[0], SamplingParams(max_tokens=5), priority=-1)
    urgent = [Request(f"u{n}", p, SamplingParams(max_tokens=5), priority=1, arrival=n) for n, p in enumerate(prompts)]
    stream = [Arrival(0, humble, "none", 0), *(Arrival(n, request, "none", 0) for n, request in enumerate(urgent))]
    simulation = Simulation(limits, stream, seed=seed, prefix_cache=prefix_cache, mixed=mixed)
    while not simulation.finished.keys() & simulation.sequences.get("humble", []):
        simulation.tick()
        assert simulation.now < len(prompts)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 5), st.integers(0, 3), st.integers(1, 9), st.integers(1, 17), st.integers(0, 3),
    st.integers(),
)  # fmt: skip
def test_a_second_turn_goes_on_from_what_the_first_computed(
    per_row: int, page_size: int, ahead: int, num_prompt: int, max_tokens: int, more: int, seed: int
) -> None:
    """The prefix cache has the first turn's pages, up to and over a page's edge, and of them no rejected token's."""
    first = Request("first", tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens, stop_token_ids=(3,)))
    # The first fills the context; the second has some left.
    limits = Limits(2, 2 * per_row + 8, 26, page_size, 60, reserve_tokens=0, max_ahead=ahead, tokens_per_row=per_row)
    simulation = Simulation(limits, [Arrival(0, first, "none", 0)], seed=seed, prefix_cache=True, mixed=True)
    simulation.run(max_ticks=1000)
    (done,) = simulation.sequences["first"]
    prompt = (*done.known(), *[1] * more)[: limits.max_len - 1]
    second = Request("second", prompt, SamplingParams(max_tokens=max_tokens), arrival=1.0)
    simulation.arrivals.append(Arrival(simulation.now, second, "none", 0))
    simulation.fates["second"] = "none"
    simulation.run(max_ticks=2000)
    simulation.check_outcome()
    least = (len(done.known()) - 1) // page_size * page_size
    assert simulation.sequences["second"][0].num_cached >= min(least, (len(prompt) - 1) // page_size * page_size)
