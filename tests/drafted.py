"""Checks that every drafter has to pass: outputs of plain decoding, whatever the cache, the context and the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from phonograph import SamplingParams, verify
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.passes.decode import DecodeBatch
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.registry import DRAFT_EXTEND, TARGET_VERIFY
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence as Seq
from speculation import MAX_LEN, Driver, Switching, check, speculating

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, top_k=20, top_p=0.9, seed=3, ignore_eos=True)
PENALISED = replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=3)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61)), (11,) * 9, tuple(range(100, 117)), (1, 2, 1, 2, 1)]
REQUESTS = [(prompt, (GREEDY, DRAWN, PENALISED)[number % 3]) for number, prompt in enumerate(PROMPTS * 2)]


def expect_drafts(
    core: EngineCore[Executor],
    depth: int,
    drafts: Callable[[Sequence[int], int], list[int]],
    is_looked_at: Callable[[], bool] = lambda: True,
) -> int:
    """After each step, rows have the drafts that a function makes of their tokens; returns how many were compared."""
    waiting, seen = [Request(f"{number}", *one) for number, one in enumerate(REQUESTS[:6])], 0
    while waiting or not core.is_idle:
        if waiting:
            core.add(waiting.pop(0))
        for sequence, tokens, finish in core.step():
            if tokens and finish is None and is_looked_at():
                found = core.executor.tables["draft"].view(-1, depth)[sequence.row].tolist()
                # What is drafted past a row's end has no page, and nobody takes it.
                left = sequence.request.params.max_tokens - len(sequence.outputs)
                assert found[:left] == drafts(sequence.known(), depth)[:left]
                seen += 1
    return seen


def expect_caught_up(
    core: EngineCore[Executor], depth: int, plain: int, drafts: Callable[[Sequence[int], int], list[int]]
) -> None:
    """After so many plain steps at a time, a round has the drafts that a function makes of all tokens, and so have the
    rounds after it."""
    widths, runner, sequences = (1,) * plain + (depth + 1,) * 2, core.executor.runners[DRAFT_EXTEND.name], list[Seq]()
    core.scheduler.width, run = (turns := Switching(widths, every=1)), runner.run
    seen = list[tuple[list[int], list[int]]]()  # compared in the end: an engine catches what this pass raises

    def looked_at(batch: DecodeBatch) -> object:
        found, table = run(batch), core.executor.tables["draft"].view(-1, depth)
        for sequence in sequences if batch.tokens_per_row > 1 else ():
            if sequence.row in batch.rows:
                left = sequence.request.params.max_tokens - len(sequence.outputs)
                seen.append((table[sequence.row].tolist()[:left], drafts(sequence.known(), depth)[:left]))
        return found

    runner.run = looked_at  # type: ignore[method-assign, assignment]
    add = core.add

    def adding(request: Request) -> list[Seq]:
        sequences.extend(made := add(request))
        return made

    core.add = adding  # type: ignore[method-assign, assignment]
    assert expect_drafts(core, depth, drafts, lambda: widths[turns.calls % len(widths)] > 1) > 10
    assert len(seen) > 5
    assert [found for found, _ in seen] == [wanted for _, wanted in seen]


def expect_plain_output(drafting: Drafting, backend: str) -> None:
    """Also of second turns; nothing runs eagerly where there are recordings."""
    core = speculating(drafting, backend)
    driver = Driver(core)
    check(driver.run(REQUESTS))
    check(driver.run(REQUESTS[::-1]))
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


def expect_plain_output_of_a_scarce_cache(drafting: Drafting) -> None:
    core = speculating(drafting, "disabled", num_pages=16, reserve_tokens=0, max_ahead=3)
    check(Driver(core, every=1).run(REQUESTS))
    assert core.scheduler.counts.preemptions > 0


def expect_plain_output_to_the_end_of_the_context(drafting: Drafting) -> None:
    core = speculating(drafting, "disabled", max_ahead=3)
    long = tuple(range(30, 30 + MAX_LEN - 20))
    check(Driver(core, every=1).run([(long, replace(GREEDY, max_tokens=40)), ((9, 8, 7), DRAWN), (long, DRAWN)]))


def expect_steady_rounds(drafting: Drafting) -> None:
    """The recordings are right, and a steady round is one launch without a copy."""
    core = speculating(drafting, reserve_tokens=MAX_LEN)
    for runner in core.executor.runners.values():
        assert verify(runner, batches=1).ok
    runner, tables, sequences = core.executor.runners[TARGET_VERIFY.name], core.executor.tables, list[Seq]()
    for number, prompt in enumerate(PROMPTS[:2]):
        sequences += core.add(Request(f"{number}", prompt, replace(GREEDY, max_tokens=60)))
    for _ in range(6):
        core.step()
    before = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    for _ in range(15):
        core.step()
    after = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    assert after == (*before[:2], before[2] + 15)
    while not core.is_idle:
        core.step()
    check(sequences)
