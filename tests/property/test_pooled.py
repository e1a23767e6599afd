"""Properties of pooled prompts: whatever is scheduled beside them, each ends with the vector of all of its tokens."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.engine.passes.registry import EMBED, PREFILL, StepPasses
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled, ScheduledStep
from phonograph.engine.requests.vectors import add_sums
from phonograph.engine.scheduling.scheduler import Scheduler


def state(token: int, position: int) -> list[float]:
    """The model: small whole numbers, so that sums are exact in any order."""
    return [token, position, token * position]


def expected(request: Request) -> list[float]:
    states = np.asarray([state(token, place) for place, token in enumerate(request.prompt)], dtype=np.float64)
    found: list[float] = (states.mean(0) if request.pooling == "mean" else states[-1]).astype(np.float32).tolist()
    return found


def sampled(step: ScheduledStep) -> Sampled:
    """What a device gives: a token each, and the sums of the spans that the step names."""
    sums = []
    for chunk in step.pooling:
        assert chunk.pooled is not None
        first, stop = chunk.pooled
        assert 0 <= first < stop <= chunk.count
        states = [state(token, chunk.start + place) for place, token in enumerate(chunk.tokens)]
        sums.append(np.sum(states[first:stop], axis=0))
    pooled = np.asarray(sums, dtype=np.float32) if sums else None
    return Sampled([5] * len(step.sampling), pooled=pooled)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["mean", "last", None]),
        st.integers(1, 24),
        st.integers(1, 12),
        st.integers(-1, 1),
        st.sampled_from(["", "", "", "cancel", "fail"]),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    seqs=st.integers(1, 4),
    more=st.integers(0, 8),
    pages=st.integers(9, 24),
    chunk=st.none() | st.integers(1, 5),
    ahead=st.integers(0, 3),
    flags=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1 << 20),
)
def test_every_vector_is_that_of_the_whole_prompt(
    requests: list[tuple[str | None, int, int, int, str]],
    seqs: int,
    more: int,
    pages: int,
    chunk: int | None,
    ahead: int,
    flags: tuple[bool, bool],
    seed: int,
) -> None:
    limits = Limits(
        max_seqs=seqs,
        max_tokens=seqs + more,
        max_len=32,
        page_size=4,
        num_pages=pages,
        max_ahead=ahead,
        chunk=chunk,
        reserve_tokens=0,
    )
    numbers = random.Random(seed)
    scheduler = Scheduler(limits, prefix_cache=flags[0], mixed=flags[1], passes=StepPasses(embeds=EMBED.name))
    waiting = deque(enumerate(requests))
    added: list[tuple[Sequence, str]] = []
    flying: deque[ScheduledStep] = deque()
    for _ in range(5000):
        if waiting and numbers.random() < 0.5:
            number, (pooling, length, outputs, priority, fate) = waiting.popleft()
            prompt = tuple((number * 7 + place) % 50 for place in range(length))
            params = SamplingParams(max_tokens=outputs if pooling is None else 0, ignore_eos=True)
            request = Request(f"r{number}", prompt, params, priority, pooling=pooling)  # type: ignore[arg-type]
            added += [(one, fate) for one in scheduler.add(request)]
        for sequence, fate in added:
            if fate and numbers.random() < 0.02 and sequence.finish is None:
                scheduler.cancel(sequence.request.id) if fate == "cancel" else scheduler.fail(sequence, "no")
        step = scheduler.schedule() if numbers.random() < 0.8 else None
        if step is not None:
            named = EMBED if step.pooling else PREFILL
            assert not step.prefills or step.pass_name == named.name
            assert not any(chunk.samples for chunk in step.pooling)
            flying.append(step)
        if flying and (step is None or numbers.random() < 0.4):
            done = flying.popleft()
            found = sampled(done)
            assert found.pooled is None or add_sums(done, found.pooled) == []
            scheduler.commit(done, found)
        scheduler.integrity()
        if not waiting and scheduler.is_idle and not flying:
            break
    assert scheduler.is_idle
    for sequence, fate in added:
        if sequence.request.pooling is None:
            continue
        assert sequence.outputs == []
        if sequence.finish is FinishReason.LENGTH:
            assert sequence.embedding is not None
            assert sequence.embedding.tolist() == expected(sequence.request)
        else:
            assert fate, sequence
            assert sequence.finish in (FinishReason.CANCELLED, FinishReason.ERROR)
