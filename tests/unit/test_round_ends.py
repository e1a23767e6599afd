"""Ends within rounds of a real engine, and what rounds leave alone: pages of others, padding, memory."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafted import GREEDY, PROMPTS, REQUESTS
from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints import default_model
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.errors import CheckpointError
from speculation import MAX_LEN, Driver, check, oracle, plain, speculating

LONG = replace(GREEDY, max_tokens=60)


# -- ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [2, 3, 4, 5])
def test_eos_within_a_round(offset: int) -> None:
    """Whatever the round brought after it is dropped, and the prefix cache holds none of it."""
    said = plain(PROMPTS[0], LONG).tokens
    eos = said[offset]
    first = said.index(eos)
    core = speculating(oracle(3, 0), "disabled", eos_ids=(eos,))
    [sequence] = Driver(core).run([(PROMPTS[0], replace(LONG, ignore_eos=False))])
    assert sequence.finish is FinishReason.STOP
    assert tuple(sequence.outputs) == said[: first + 1]
    assert sequence.num_accepted > 0
    again = replace(LONG, max_tokens=8)
    check(Driver(core).run([((*PROMPTS[0], *sequence.outputs, 4), again)]))


def test_a_deadline_within_rounds() -> None:
    core = speculating(oracle(3, 0), "disabled", max_ahead=2)
    now = time.monotonic()
    [late] = core.add(Request("late", PROMPTS[0], LONG, deadline=now + 3600, arrival=now))
    [other] = core.add(Request("other", PROMPTS[1], GREEDY))
    for _ in range(5):
        core.step()
    assert late.num_accepted > 0
    core.scheduler.expire(now + 3601)
    while not core.is_idle:
        core.step()
    assert late.finish is FinishReason.DEADLINE
    assert tuple(late.outputs) == plain(PROMPTS[0], LONG).tokens[: len(late.outputs)]
    check([other])
    core.scheduler.integrity()
    turn = (*PROMPTS[0], *late.outputs, 4)
    check(Driver(core).run([(turn, GREEDY)]))


@pytest.mark.slow
def test_a_stop_string_within_a_round() -> None:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    sizes: dict[str, Any] = {"max_seqs": 2, "max_len": 256}
    text = "Repeat: one two three four five six seven eight. one two three four five six seven eight. one two"
    params = SamplingParams(max_tokens=24, temperature=0.0)
    plainly = LLM(device="cpu", options=EngineOptions(**sizes))
    drafted = LLM(device="cpu", options=EngineOptions(**sizes, speculate="ngram"))
    whole = plainly.generate([text], params)[0].text
    for stop in {word for word in whole.split() if len(word) > 2}:
        asked = replace(params, stop=(stop,))
        [wanted], [found] = plainly.generate([text], asked), drafted.generate([text], asked)
        assert (found.text, found.tokens, found.finish) == (wanted.text, wanted.tokens, wanted.finish), stop
    assert drafted.core.speculation.counts.accepted[0] > 0


# -- what is left alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["disabled", pytest.param("full", marks=pytest.mark.slow)])
def test_a_padded_batch_writes_into_no_live_page_but_its_rows_own(backend: str) -> None:
    """Three rows in a bucket of four, one of them past its own end: bytes of other rows' pages stay as they are."""
    core = speculating(oracle(3, 30), backend, max_ahead=0, reserve_tokens=MAX_LEN)
    sequences = [core.add(Request(f"{n}", prompt, LONG))[0] for n, prompt in enumerate(PROMPTS[:3])]
    for _ in range(4):
        core.step()
    memory, tables = core.executor.cache.tensors, core.executor.tables
    for _ in range(8):
        before = [tensor.clone() for tensor in memory]
        starts = {one: int(tables.length[one.row]) for one in sequences}
        core.step()
        for tensor, old in zip(memory, before, strict=True):
            for one, start in starts.items():
                pages = one.pages
                now, then = (kept[:, pages].flatten(1, 2) for kept in (tensor, old))
                assert torch.equal(now[:, :start], then[:, :start]), "what was computed is never written again"
                assert torch.equal(now[:, start + 4 :], then[:, start + 4 :]), "nothing past the round"
            used = {page for one in sequences for page in one.pages} | {0}
            free = [page for page in range(tensor.shape[1]) if page not in used]
            assert torch.equal(tensor[:, free], old[:, free])


def live_bytes() -> int:
    """Of all tensors that anything holds; those that traces leave behind have no memory."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.slow
def test_steady_rounds_allocate_nothing_outside_pool_and_columns() -> None:
    core = speculating(oracle(3, 40), reserve_tokens=MAX_LEN)
    sequences = [core.add(Request(f"{n}", prompt, LONG))[0] for n, prompt in enumerate(PROMPTS[:2])]
    for _ in range(6):
        core.step()
    pool = core.executor.runners["target_verify"].pool
    places = {name: core.executor.tables[name].data_ptr() for name in ("draft", "depth", "limit", "length")}
    before, buffers = live_bytes(), pool.report().num_allocations
    for _ in range(12):
        core.step()
    assert live_bytes() <= before
    assert pool.report().num_allocations == buffers
    assert places == {name: core.executor.tables[name].data_ptr() for name in places}
    while not core.is_idle:
        core.step()
    check(sequences)


def test_outputs_of_padded_batches_of_every_size() -> None:
    """One to four rows, in buckets that hold more."""
    for count in range(1, 5):
        core = speculating(oracle(3, 30), "disabled", prefix_cache=False)
        check(Driver(core, every=1).run(REQUESTS[:count]))
