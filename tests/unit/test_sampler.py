"""The samplers: right cuts, the same tokens in torch, Triton and C++, and the ends of every number's domain.

Triton's is interpreted where there is no GPU: too slow to draw often, so there it is held against torch's.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph.engine.ops.native.library import library
from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.requests.step import NOT_FINITE, NOTHING_ALLOWED
from phonograph.engine.sampling.cpu import CpuSampler
from phonograph.engine.sampling.penalties import Penalties, penalise
from phonograph.engine.sampling.sampler import (
    Sampler,
    SamplingRows,
    TorchSampler,
    check_declared,
    few_threads,
    gumbel,
    kept,
)
from phonograph.engine.state.column import TrialRows
from phonograph.errors import DeviceError
from phonograph.graphs.trust.rounding import Rounding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], device=DEVICE)


def implementations() -> dict[str, Sampler]:
    found: dict[str, Sampler] = {"torch": TorchSampler()}
    if DEVICE.type == "cpu":
        with contextlib.suppress(DeviceError):
            found["cpu"] = CpuSampler(library())
    try:
        from phonograph.engine.sampling.triton.sampler import TritonSampler
    except ImportError:
        return found
    return {**found, "triton": TritonSampler()}


SAMPLERS = implementations()
FAST = [name for name in SAMPLERS if name != "triton" or DEVICE.type == "cuda"]
OTHERS = [name for name in SAMPLERS if name != "torch"]
INF, NAN = float("inf"), float("nan")


def rows(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingRows:
    """One seed, every row at another position."""
    return SamplingRows(
        torch.full((count,), temperature, device=DEVICE),
        torch.full((count,), top_k, dtype=torch.int32, device=DEVICE),
        torch.full((count,), top_p, device=DEVICE),
        torch.full((count,), min_p, device=DEVICE),
        torch.full((count,), 11, dtype=torch.int64, device=DEVICE),
        torch.arange(count, device=DEVICE),
    )


def frequencies(sampler: Sampler, level: Sampling, **params: float) -> torch.Tensor:
    drawn = sampler.pick(LOGITS.expand(DRAWS, -1), rows(DRAWS, **params), level)  # type: ignore[arg-type]
    return torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize("name", FAST)
def test_tokens_are_drawn_with_their_probabilities(name: str) -> None:
    for temperature in (0.7, 1.0, 2.0):
        wanted = (LOGITS / temperature).softmax(-1)
        for level in (Sampling.SAMPLED, Sampling.TRUNCATED):
            found = frequencies(SAMPLERS[name], level, temperature=temperature)
            torch.testing.assert_close(found, wanted, atol=0.015, rtol=0)


@pytest.mark.parametrize("name", FAST)
def test_top_k_top_p_and_min_p_cut_where_they_should(name: str) -> None:
    probs = LOGITS.softmax(-1)  # 0.58, 0.21, 0.13, 0.08, 0.03, 0.004
    for params, num_kept in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.85}, 3),
        ({"min_p": 0.2}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9}, 1),
    ):
        wanted = torch.where(torch.arange(len(probs), device=DEVICE) < num_kept, probs, 0.0)
        found = frequencies(SAMPLERS[name], Sampling.TRUNCATED, **params)
        torch.testing.assert_close(found, wanted / wanted.sum(), atol=0.015, rtol=0)


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_temperature_zero_is_greedy_at_every_level(name: str) -> None:
    logits = torch.randn(5, 300, device=DEVICE)
    for level in (Sampling.GREEDY, Sampling.SAMPLED, Sampling.TRUNCATED):
        assert torch.equal(SAMPLERS[name].pick(logits, rows(5, temperature=0.0), level), logits.argmax(-1))


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_plain_and_truncated_recordings_draw_the_same_tokens(name: str) -> None:
    logits = torch.randn(8, 500, device=DEVICE)
    one, other = (SAMPLERS[name].pick(logits, rows(8), level) for level in (Sampling.SAMPLED, Sampling.TRUNCATED))
    assert torch.equal(one, other)


CUTS = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-k, flat": {"top_k": 30, "temperature": 20.0},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0},
    "one token": {"top_k": 1},
}


DTYPES = [*((cut, torch.float32) for cut in CUTS), ("all", torch.bfloat16), ("all", torch.float16)]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("cut", "dtype"), DTYPES)
def test_all_pick_the_tokens_that_torch_picks(name: str, cut: str, dtype: torch.dtype) -> None:
    """Over several chunks; one row has ties, one forbidden tokens, one is flat, and one seed fills 64 bits."""
    torch.manual_seed(3)
    logits = torch.randn(6, 5000, device=DEVICE) * 3
    logits[1] = logits[1].round()
    logits[2, 1000:4500] = -INF
    logits[5] = 1.0
    asked = rows(6, **CUTS[cut])  # type: ignore[arg-type]
    asked.seed[3:] = -0x2BCDEF0123456789
    for level in (Sampling.SAMPLED, Sampling.TRUNCATED)[cut != "none" :]:
        found, wanted = (SAMPLERS[n].pick(logits.to(dtype), asked, level) for n in (name, "torch"))
        assert torch.equal(found, wanted)


ROWS = {
    "random": torch.tensor([3.0, 1.0, -2.0, 2.5, 0.0, -7.0, 1.5, 2.0]),
    "ties at the edge": torch.tensor([2.0, 5.0, 2.0, 2.0, 1.0, 2.0, 0.0, 4.0]),
    "flat": torch.zeros(8),
    "one token": torch.tensor([4.0]),
    "forbidden ones": torch.tensor([-INF, 1.0, -INF, 0.5, 2.0, -INF, -INF, 0.0]),
    "all but one forbidden": torch.tensor([-INF, -INF, -INF, 1.0]),
    "far apart": torch.tensor([300.0, 0.0, 299.0, -300.0, 298.0, 5.0, 297.5, -1e30]),
}
ASKED: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 1e-30},
    {"top_p": 0.625},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 0.25},
    {"top_k": 4, "top_p": 0.7},
    {"top_k": 4, "top_p": 0.7, "min_p": 0.3},
    {"top_k": 5, "top_p": 0.6, "min_p": 0.1, "temperature": 3.0},
    {"top_k": 2, "top_p": 0.5, "temperature": 1e30},
    {"top_p": 0.9, "temperature": 1e-3},
]


def as_transformers(logits: torch.Tensor, asked: dict[str, float]) -> torch.Tensor:
    """Which tokens its warpers leave, in float64 and in the order that its `generate` has them in."""
    from transformers.generation import logits_process as warpers

    scores = (logits.double() / asked.get("temperature", 1.0))[None]
    ids = torch.zeros((1, 1), dtype=torch.int64)
    if top_k := int(asked.get("top_k", 0)):
        scores = warpers.TopKLogitsWarper(top_k)(ids, scores)
    if (top_p := asked.get("top_p", 1.0)) < 1:
        scores = warpers.TopPLogitsWarper(top_p)(ids, scores)
    if min_p := asked.get("min_p", 0.0):
        scores = warpers.MinPLogitsWarper(min_p)(ids, scores)
    return scores[0] > -INF


@pytest.mark.parametrize("row", list(ROWS))
def test_truncation_keeps_what_transformers_keeps(row: str) -> None:
    for asked in ASKED:
        scaled = (ROWS[row] - ROWS[row].max())[None] / asked.get("temperature", 1.0)
        cut = rows(1, **asked)  # type: ignore[arg-type]
        found = kept(scaled.to(DEVICE), cut)[0].cpu() & (ROWS[row] > -INF)
        assert torch.equal(found, as_transformers(ROWS[row], asked)), asked


@pytest.mark.parametrize("seed", range(4))
def test_truncation_keeps_what_transformers_keeps_of_many(seed: int) -> None:
    """At the edge of top-p one more or less may be kept, by float32's rounding, and of equals others: its sort says."""
    torch.manual_seed(seed)
    for vocab, scale in ((50, 1.0), (3000, 0.3), (3000, 4.0), (49_152, 2.0)):
        logits = torch.randn(vocab) * scale
        logits[::3] = (logits[::3] * 4).round() / 4
        for asked in ({"top_k": 40, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.01}, {"top_k": 17, "min_p": 0.2}):
            found = kept((logits - logits.max())[None].to(DEVICE), rows(1, **asked))[0].cpu()  # type: ignore[arg-type]
            one, other = sorted([logits[found], logits[as_transformers(logits, asked)]], key=len)
            assert len(other) - len(one) <= ("top_p" in asked)
            assert torch.equal(one.sort(descending=True).values, other.sort(descending=True).values[: len(one)])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("row", list(ROWS))
def test_all_keep_what_torch_keeps(name: str, row: str) -> None:
    """Every cut in one batch, many draws each: from the same noise, only another cut gives another token."""
    times = 40 if name != "triton" or DEVICE.type == "cuda" else 2
    asked = [rows(times, **cut) for cut in ASKED]  # type: ignore[arg-type]
    columns = [torch.cat(column) for column in zip(*(vars(each).values() for each in asked), strict=True)]
    logits = ROWS[row].to(DEVICE).expand(len(ASKED) * times, -1)
    found, wanted = (SAMPLERS[n].pick(logits, SamplingRows(*columns), Sampling.TRUNCATED) for n in (name, "torch"))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", OTHERS)
def test_of_equals_all_keep_as_many_as_torch(name: str) -> None:
    """The edge of top-p is a product in float32: 0.3 of ten is three, though the float 0.3 is a little more."""
    is_slow = name == "triton" and DEVICE.type != "cuda"
    cuts, times = ([0.2, 0.3, 0.6], 8) if is_slow else ([n / 20 for n in range(1, 20)], 60)
    for vocab in (5, 10) if is_slow else (2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 75, 90, 100):
        asked = [rows(times, top_p=top_p) for top_p in cuts]
        columns = [torch.cat(column) for column in zip(*(vars(each).values() for each in asked), strict=True)]
        logits = torch.full((len(cuts) * times, vocab), 1.5, device=DEVICE)
        found, wanted = (SAMPLERS[n].pick(logits, SamplingRows(*columns), Sampling.TRUNCATED) for n in (name, "torch"))
        assert torch.equal(found, wanted), vocab


def test_of_equals_at_most_one_more_or_less_is_kept_than_transformers_keeps() -> None:
    """And never fewer than top-p asks for: it sums rounded probabilities, and so keeps one too many itself."""
    from transformers.generation.logits_process import TopPLogitsWarper

    cuts = [n / 100 for n in range(1, 100)]
    for vocab in (1, 2, 3, 10, 15, 25, 60, 100, 300):
        logits = torch.zeros(len(cuts), vocab, device=DEVICE)
        top_p = torch.tensor(cuts, device=DEVICE)
        found = kept(logits, replace(rows(len(cuts)), top_p=top_p)).sum(-1).tolist()
        for number, num_kept in enumerate(found, 1):
            needed = -(-number * vocab // 100)
            theirs = int(TopPLogitsWarper(number / 100)(None, torch.zeros(1, vocab)).isfinite().sum())
            assert num_kept - needed in (0, 1), (vocab, number)
            assert abs(num_kept - theirs) <= 1, (vocab, number)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["random", "few steps", "all in one place", "mostly forbidden", "flat"])
def test_the_k_highest_of_a_large_vocabulary(name: str, kind: str) -> None:
    """Few of many chunks: whether the highest are spread over them or stand together, equal or not."""
    vocab, cuts = 20_500, [(1, 1.0), (3, 0.5), (11, 0.9), (11, 1.0), (12, 0.2), (2000, 0.7)]
    logits = torch.randn(len(cuts), vocab, generator=torch.Generator().manual_seed(5)).to(DEVICE) * 3
    if kind == "few steps":
        logits = logits.round()
    elif kind == "all in one place":
        logits[:, 4100:4140] += 30
    elif kind == "mostly forbidden":
        logits[:, 5000:] = -INF
    elif kind == "flat":
        logits[:] = 1.5
    asked = [rows(1, top_k=k, top_p=p, min_p=0.01 if k == 12 else 0.0) for k, p in cuts]
    columns = [torch.cat(column) for column in zip(*(vars(each).values() for each in asked), strict=True)]
    for shift in range(1 if name == "triton" and DEVICE.type == "cpu" else 3):
        drawn = SamplingRows(*[*columns[:-2], columns[-2] + shift, columns[-1] + 7 * shift])
        found, wanted = (SAMPLERS[n].pick(logits, drawn, Sampling.TRUNCATED) for n in (name, "torch"))
        assert torch.equal(found, wanted)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """A loop that does not end is a failure; of a GPU's kernel, only once it has."""

    def late(*_: object) -> None:
        pytest.fail(f"it took more than {seconds} s")  # no Exception, which verify would go on after

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_a_clear_pick_stays_where_verify_changes_all_that_kernels_read(name: str, dtype: torch.dtype) -> None:
    """Logits, and what was found of them by a kernel before, are changed by themselves, and no longer fit together."""
    logits, asked = torch.linspace(0, 6, 200, device=DEVICE).repeat(3, 1), rows(3, top_p=0.6, min_p=0.05)
    logits[:, 77] = 10.0
    asked.top_k.copy_(torch.tensor([1, 2, 0]))
    logits = logits.to(dtype)

    def run(around: Any) -> dict[str, torch.Tensor]:
        with around:
            changed = logits * 1.0
            return {"logits": changed, "tokens": SAMPLERS[name].pick(changed, asked, Sampling.TRUNCATED)}

    with within(60):
        looks = list(Rounding(run).allowed("tokens", torch.full((3,), 77)))
    assert len(looks) >= 2
    assert all(moved is not None and not moved.any() for moved in looks)


@pytest.mark.skipif("triton" not in SAMPLERS, reason="Triton is not installed")
@pytest.mark.parametrize("vocab", [300, 4500])
@pytest.mark.parametrize("shift", [0.5, -0.5, 50.0])
def test_a_row_is_settled_whatever_was_surveyed_of_it(vocab: int, shift: float) -> None:
    """The highest logit that was told is above all, or below some: a loop that waits for it would have no end."""
    from phonograph.engine.sampling.triton.picking import CHUNK, KEPT, settle

    cuts = [(1, 0.6, 0.0), (2, 0.9, 0.0), (0, 1.0, 1.0), (0, 1e-30, 0.0), (5, 0.5, 1.0), (2000, 0.3, 0.9)]
    asked, num_chunks = rows(len(cuts)), -(-vocab // CHUNK)
    for column, values in zip((asked.top_k, asked.top_p, asked.min_p), zip(*cuts, strict=True), strict=True):
        column.copy_(torch.tensor(values))
    logits = torch.randn(len(cuts), vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 3
    parts = [part.max(1) for part in logits.split(CHUNK, 1)]
    tops = torch.stack([part.values for part in parts], 1) + shift
    tokens = torch.stack([part.indices + at * CHUNK for at, part in enumerate(parts)], 1).int()
    tokens, masses = (tokens + 3) % vocab, torch.ones_like(tops)
    found = torch.full((len(cuts),), -9, device=DEVICE)
    room = torch.empty(len(cuts), KEPT, dtype=torch.int32, device=DEVICE)
    with within(60):
        settle[(len(cuts),)](
            logits, asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.seed, asked.positions,
            tokens, tops, masses, room, found, vocab, vocab, num_chunks,
            chunks=1 << (num_chunks - 1).bit_length(), kept=KEPT, is_greedy=False, truncated=True,
            precise=DEVICE.type != "cpu", num_warps=16,
        )  # fmt: skip
        picked = found.tolist()
    assert all(0 <= token < vocab for token in picked), picked
    if shift > 0:  # where nothing is allowed, the highest is taken
        assert [picked[row] for row in (0, 2, 4)] == logits.argmax(-1)[[0, 2, 4]].tolist()


LEVELS = (Sampling.GREEDY, Sampling.SAMPLED, Sampling.TRUNCATED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_have_theirs(name: str, dtype: torch.dtype) -> None:
    vocab = 2100
    logits = torch.randn(7, vocab, device=DEVICE)
    sound = SAMPLERS[name].pick(logits.to(dtype), rows(7), Sampling.SAMPLED)
    logits[1, 0] = logits[2, vocab - 1] = NAN
    logits[3] = NAN
    logits[4, 7] = INF
    logits[5] = -INF
    cases = [(level, temperature) for level in LEVELS for temperature in (0.0, 1.0)]
    for level, temperature in cases if dtype == torch.float32 else cases[-1:]:
        asked = rows(7, temperature=temperature, top_k=30, top_p=0.9)
        found = SAMPLERS[name].pick(logits.to(dtype), asked, level)
        assert found[1:6].tolist() == [NOT_FINITE] * 4 + [NOTHING_ALLOWED]
        assert (found[[0, 6]] >= 0).all()
    assert SAMPLERS[name].pick(logits.to(dtype), rows(7), Sampling.SAMPLED)[[0, 6]].tolist() == sound[[0, 6]].tolist()
    told = SAMPLERS[name].logprobs(logits.to(dtype), found, 3)
    assert told.token_logprob[[0, 6]].isfinite().all()


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize("temperature", [2.0**-126, 1e-6, 1e30, 3.4e38])
def test_the_ends_of_temperature(name: str, temperature: float) -> None:
    logits = torch.randn(4, 300, device=DEVICE) * 10
    logits[2, 5] = 3e38
    logits[2, 6] = -3e38
    logits[3] = torch.linspace(-3.4e38, -3.3e38, 300)
    for level in (Sampling.SAMPLED, Sampling.TRUNCATED):
        asked = rows(4, temperature=temperature, top_k=0 if level is Sampling.SAMPLED else 200, top_p=0.99)
        found = SAMPLERS[name].pick(logits, asked, level)
        assert ((found >= 0) & (found < 300)).all()
        if temperature < 1e-3:  # nothing is as near to the best as that
            assert torch.equal(found, logits.argmax(-1))
        assert torch.equal(found, SAMPLERS["torch"].pick(logits, asked, level))


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_the_ends_of_seeds_positions_and_vocabularies(name: str) -> None:
    asked = rows(6)
    asked.seed.copy_(torch.tensor([0, 2**63 - 1, 2**63 - 1, 2**62, -1, -(2**63)]))
    asked.positions.copy_(torch.tensor([0, 2**31 - 1, 2**31 - 2, 0, 1, 1]))
    logits = torch.zeros(6, 4000, device=DEVICE)
    found = SAMPLERS[name].pick(logits, asked, Sampling.SAMPLED)
    assert len(found.unique()) == 6
    assert torch.equal(found, SAMPLERS["torch"].pick(logits, asked, Sampling.SAMPLED))
    for level in LEVELS:
        assert SAMPLERS[name].pick(torch.full((6, 1), -3.0, device=DEVICE), asked, level).tolist() == [0] * 6


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_logprobs_of_ties_and_of_what_is_forbidden(name: str) -> None:
    logits = torch.full((1, 3000), -INF, device=DEVICE)
    logits[0, [7, 2100]] = 1.0
    found = SAMPLERS[name].logprobs(logits, torch.tensor([5], device=DEVICE), 4)
    assert found.token_logprob.tolist() == [-INF]
    assert sorted(found.top_ids[0, :2].tolist()) == [7, 2100]
    torch.testing.assert_close(found.top_logprobs[0].cpu(), torch.tensor([0.5, 0.5, 0.0, 0.0]).log())


def test_few_rows_take_one_thread_and_many_take_all() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with few_threads(torch.empty(2, 49_152)):
            assert torch.get_num_threads() == 1
        with few_threads(torch.empty(64, 49_152)):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize(("vocab", "count"), [(5000, 20), (7, 20), (300, 1)])
def test_logprobs(name: str, vocab: int, count: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, vocab, device=DEVICE) * 4
    tokens = torch.tensor([0, vocab - 1, 3], device=DEVICE)
    exact = logits.double().log_softmax(-1)
    found = SAMPLERS[name].logprobs(logits, tokens, count)
    top = exact.sort(dim=-1, descending=True)
    torch.testing.assert_close(found.token_logprob.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.top_logprobs.double(), top.values[:, :count], rtol=0, atol=1e-5)
    assert torch.equal(found.top_ids, top.indices[:, :count])


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_nobody_gets_nothing(name: str) -> None:
    logits = torch.randn(0, 30, device=DEVICE)
    assert SAMPLERS[name].pick(logits, rows(0), Sampling.TRUNCATED).shape == (0,)
    assert SAMPLERS[name].logprobs(logits, torch.zeros(0, dtype=torch.int64, device=DEVICE), 3).top_ids.shape == (0, 3)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([3, 3, 4, 3]), torch.tensor([7, 8, 7, 7])
    noise = gumbel(seeds, positions, 1000)
    assert torch.equal(noise[0], noise[3])
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert torch.equal(gumbel(seeds[1:2], positions[1:2], 1000)[0], noise[1])
    assert torch.equal(gumbel(seeds[:1], positions[:1], 400)[0], noise[0, :400])
    assert abs(noise.mean().item() - 0.5772) < 0.1
    assert noise.isfinite().all()


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    penalties = Penalties(
        counts=torch.tensor([[3, 0, 0, 1]], dtype=torch.int32),
        prompted=torch.tensor([[False, True, False, False]]),
        bias_ids=torch.tensor([[2, 0]]),
        bias=torch.tensor([[5.0, 0.0]]),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.25]),
        frequency=torch.tensor([0.5]),
    )
    # said: halved, less 0.5 a time, less 0.25; prompted and negative: doubled; biased; said once
    wanted = torch.tensor([[2 / 2 - 1.5 - 0.25, -4.0, 6.0, 0.25 - 0.5 - 0.25]])
    torch.testing.assert_close(penalise(logits, penalties), wanted)


@pytest.mark.parametrize("repetition", [2.0**-126, 1e-30, 1e30, 3.4e38])
def test_no_penalty_makes_logits_that_are_not_finite(repetition: float) -> None:
    logits = torch.tensor([[50.0, -50.0, 0.0, 3e38, -3e38, -INF, 1.0]])
    most = torch.iinfo(torch.int16).max
    penalties = Penalties(
        counts=torch.full((1, 7), most, dtype=torch.int16),
        prompted=torch.ones((1, 7), dtype=torch.bool),
        bias_ids=torch.full((1, 300), 6),
        bias=torch.full((1, 300), 100.0),
        repetition=torch.tensor([repetition]),
        presence=torch.tensor([2.0]),
        frequency=torch.tensor([2.0]),
    )
    found = penalise(logits, penalties)[0]
    assert found[[0, 1, 2, 3, 4, 6]].isfinite().all()
    assert found[5] == -INF
    assert found[0] >= found[1]
    assert found[3] >= found[4]
    for broken in (NAN, INF):
        assert not penalise(torch.full((1, 7), broken), penalties).isfinite().any()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_parameter_that_a_sampler_names_changes_what_it_draws(name: str) -> None:
    """Values are those of trial runs: a parameter that somebody adds is among them."""
    sampler, count = SAMPLERS[name], 48
    check_declared(sampler)
    numbers = torch.Generator().manual_seed(0)
    trial = TrialRows(count, vocab=6, page_size=8, num_pages=1, last_start=15, numbers=numbers)
    usual = {column.name: torch.full((count,), column.default, dtype=column.dtype) for column in sampler.columns}
    usual |= {"temperature": torch.ones(count), "seed": torch.arange(count)}
    logits, positions = LOGITS.repeat(count, 1), torch.arange(count, device=DEVICE)

    def drawn(values: dict[str, torch.Tensor]) -> list[int]:
        given = {name: value.to(DEVICE) for name, value in values.items()}
        found: list[int] = sampler.pick(logits, sampler.rows(**given, positions=positions), Sampling.TRUNCATED).tolist()
        return found

    for column in sampler.columns:
        assert column.trial is not None
        changed = {**usual, column.name: column.trial(trial).to(column.dtype)}
        assert drawn(changed) != drawn(usual), column.name
