"""Axes: products of features are recorded under a bound, served, counted and shown."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import Axis, Buckets, DeclarationError, EmulatedDevice, Extent, Phase, Reason, Replay, Runner, verify
from phonograph.engine.process.statistics import phase_stats
from phonograph.graphs.phases.axes import all_products, recorded_products, stronger_products, weaker_products
from phonograph.graphs.phases.selection import select
from phonograph.graphs.progress import silent
from runners import phase_plan, sample_x, x_slot

DEVICE = EmulatedDevice()
SAMPLING = ("greedy", "sampled", "detailed")
LORA = ("off", "on")


def axis(name: str, values: tuple[str, ...], **declared: Any) -> Axis:
    return Axis(
        name, values, of=lambda batch: batch[name], apply=lambda batch, value: batch | {name: value}, **declared
    )


AXES = (axis("sampling", SAMPLING), axis("lora", LORA))


def body(batch: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = batch["x"] * (1 + SAMPLING.index(batch["sampling"])) + 10 * LORA.index(batch["lora"])
    return result


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    return sample_x(DEVICE)(extent, seed) | {"sampling": "greedy", "lora": "off"}


def make(bound: int = 200, sizes: tuple[int, ...] = (2, 4, 8), forward: Any = body, **declared: Any) -> Runner:
    given_phase: dict[str, Any] = {"axes": AXES, "sample": sample} | declared
    phase = Phase(name="decode", slots=[x_slot()], bucketed="seqs", body=forward, **given_phase)
    runner = Runner(phase, DEVICE, dataclasses.replace(phase_plan(*sizes), max_recordings=bound))
    runner.capture(silent)
    return runner


def batch(seqs: int, sampling: str, lora: str) -> dict[str, Any]:
    return {"x": torch.ones(seqs, 4), "sampling": sampling, "lora": lora}


def products_of(runner: Runner) -> set[str]:
    return {key.axes for key in runner.captured}


def test_every_product_has_recordings_that_explain_names() -> None:
    runner = make()
    assert len(runner.captured) == 3 * 3 * 2
    for sampling, lora in itertools.product(SAMPLING, LORA):
        one = batch(3, sampling, lora)
        torch.testing.assert_close(runner.run(one), body(one))
    assert runner.stats.replays.total() == 6
    assert "decode[seqs=4, sampling=detailed, lora=on]" in runner.explain()
    assert "left out" not in runner.explain()
    assert verify(runner).ok


def test_only_declared_products_are_recorded() -> None:
    runner = make(products=[{"lora": "off"}, {"sampling": "greedy"}])
    assert products_of(runner) == {"", "sampling=sampled", "sampling=detailed", "lora=on"}
    runner.run(batch(3, "sampled", "on"))
    assert runner.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 1}
    assert "no recordings for sampling=sampled, lora=on" in runner.explain()


def test_a_bound_thins_products_and_explain_names_what_was_left_out() -> None:
    runner = make(bound=3 + 5 * 2)
    assert len(runner.captured) == 13
    one = batch(3, "detailed", "on")
    torch.testing.assert_close(runner.run(one), body(one))
    assert [str(key) for key in runner.stats.replays] == ["decode[seqs=8, sampling=detailed, lora=on]"]
    assert "left out: sampling=detailed, lora=on: sizes 4, which the next larger one serves" in runner.explain()
    assert "max_recordings is 13" in str(runner.report)
    assert verify(runner).ok


def test_products_beyond_the_bound_run_eagerly_with_a_counted_reason() -> None:
    runner = make(bound=5)
    assert len(runner.captured) == 5
    one = batch(3, "detailed", "on")
    torch.testing.assert_close(runner.run(one), body(one))
    assert runner.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 1}
    assert runner.stats.details[Reason.FEATURE_NOT_CAPTURED].startswith("left out: sampling=detailed, lora=on: all")
    assert "left out: sampling=detailed, lora=on: all sizes (max_recordings is 5)" in runner.explain()


def test_metrics_show_products_and_what_was_left_out() -> None:
    runner = make(bound=13)
    runner.run(batch(2, "sampled", "on"))
    found = phase_stats("decode", runner, {})
    replayed = [(made.axes, made.size, made.replays) for made in found.recordings if made.replays]
    assert replayed == [("sampling=sampled, lora=on", 2, 1)]
    assert len(found.recordings) == 13
    assert len(found.left_out) == 5


def test_the_plain_product_is_never_thinned() -> None:
    assert products_of(make(bound=1)) == {""}
    assert len(make(bound=1).captured) == 3


def test_a_value_that_the_axis_does_not_have_runs_eagerly() -> None:
    runner = make(forward=lambda given: given["x"] * 2)
    runner.run(batch(3, "beam", "off"))
    assert "sampling='beam' is no value of its axis" in runner.explain()


def test_a_sample_of_another_product_is_refused_by_name() -> None:
    wrong = Axis("lora", LORA, of=lambda given: given["lora"], apply=lambda given, value: given)
    runner = make(axes=[AXES[0], wrong])
    failed = {str(row.key): str(row.error) for row in runner.report.failures} if runner.report else {}
    assert len(failed) == 9
    assert "expected lora=on" in failed["decode[seqs=2, lora=on]"]


@pytest.mark.parametrize(
    "declare",
    [
        lambda: axis("lora", ()),
        lambda: axis("lora", ("on", "on")),
        lambda: axis("lora", ("off", "on"), unrecorded=frozenset({"of"})),
        lambda: make(axes=[AXES[0], AXES[0]]),
        lambda: make(products=[]),
        lambda: make(products=[{"lora": "maybe"}]),
        lambda: make(products=[{"mode": "on"}]),
    ],
)
def test_wrong_declarations_are_refused(declare: Any) -> None:
    with pytest.raises(DeclarationError):
        declare()


STANDS_IN = (axis("sampling", SAMPLING, stands_in=True, unrecorded=frozenset({"sampled"})), AXES[1])


def test_a_stronger_recording_stands_in_where_it_is_declared() -> None:
    runner = make(axes=STANDS_IN, forward=lambda given: given["x"] * 2 + LORA.index(given["lora"]))
    torch.testing.assert_close(runner.run(batch(3, "sampled", "on")), torch.full((3, 4), 3.0))
    assert [str(key) for key in runner.stats.replays] == ["decode[seqs=4, sampling=detailed, lora=on]"]
    assert "decode[seqs=4, sampling=sampled] is served by decode[seqs=4, sampling=detailed]" in runner.explain()
    report = verify(runner)
    assert report.ok
    assert any(check.name.startswith("stands in for decode[seqs=4, sampling=sampled") for check in report.checks)


def test_verify_finds_a_recording_that_must_not_stand_in() -> None:
    failures = verify(make(axes=STANDS_IN)).failures
    assert failures
    assert {check.name.partition(" for ")[0] for check in failures} == {"stands in"}


def test_verify_finds_a_stand_in_with_outputs_that_nobody_expects() -> None:
    def more(given: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"x": given["x"]} | ({"logprobs": given["x"] + 1} if given["sampling"] == "detailed" else {})

    failures = verify(make(axes=STANDS_IN, forward=more)).failures
    assert failures
    assert all("logprobs" in check.detail for check in failures)


RUNNERS = {
    "all": make(),
    "thinned": make(bound=13),
    "few": make(bound=5),
    "declared": make(products=[{"lora": "off"}, {"sampling": "greedy"}]),
    "unrecorded": make(axes=(axis("sampling", SAMPLING, unrecorded=frozenset({"sampled"})), AXES[1])),
}


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(RUNNERS)), st.integers(0, 10), st.sampled_from(SAMPLING), st.sampled_from(LORA))
def test_decide_says_what_run_does_for_products(name: str, seqs: int, sampling: str, lora: str) -> None:
    runner, one = RUNNERS[name], batch(seqs, sampling, lora)
    decision = runner.decide(one)
    replays, eager_calls = runner.stats.replays.copy(), runner.stats.eager.copy()
    torch.testing.assert_close(runner.run(one), body(one))
    assert runner.last == decision
    if isinstance(decision, Replay):
        assert runner.stats.replays - replays == {decision.key: 1}
        assert values_of(decision.key) == {"sampling": sampling, "lora": lora}
    else:
        assert runner.stats.eager - eager_calls == {decision.reason: 1}


def values_of(key: Any) -> dict[str, str]:
    return {"sampling": "greedy", "lora": "off"} | dict(key.values)


@given(
    st.lists(st.integers(1, 4), max_size=3),
    st.frozensets(st.integers(1, 500), min_size=1, max_size=40),
    st.integers(1, 400),
)
def test_a_selection_keeps_to_its_bound_and_names_the_rest(counts: list[int], sizes: Any, bound: int) -> None:
    axes = [axis(f"a{index}", tuple(f"v{i}" for i in range(count))) for index, count in enumerate(counts)]
    phase = Phase(name="decode", slots=[x_slot()], bucketed="seqs", body=body, sample=sample, axes=axes)
    buckets = Buckets(tuple(sorted(sizes)))
    selection = select(phase, buckets, bound)
    products = all_products(axes)
    assert len(selection.keys) == len(set(selection.keys)) <= max(bound, len(buckets))
    assert selection.sizes[()] == buckets
    left = {one.product: one.sizes for one in selection.left_out}
    for product in products:
        kept = selection.sizes[product].sizes if product in selection.sizes else ()
        assert sorted((*kept, *left.get(product, ()))) == list(buckets)
        assert not kept or kept[-1] == buckets.largest
    assert bool(left) == (len(products) * len(buckets) > max(bound, len(buckets)))


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=3))
def test_stronger_and_weaker_are_the_same_order_seen_from_both_ends(declared: list[tuple[int, bool]]) -> None:
    axes = [axis(f"a{i}", tuple(f"v{j}" for j in range(n)), stands_in=s) for i, (n, s) in enumerate(declared)]
    products = recorded_products(axes, None)
    assert products == all_products(axes)
    for one, other in itertools.product(products, products):
        assert (one in weaker_products(axes, other)) == (other in stronger_products(axes, one))
        assert one != other or one not in weaker_products(axes, other)
