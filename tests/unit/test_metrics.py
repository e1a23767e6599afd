"""What the engine and the server count: right, complete, in Prometheus' words, and never backwards."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

import statuses
from phonograph import Reason
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.step_timing import StepTiming
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.statistics import EngineStats, PhaseStats, engine_stats
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.scheduling.speculation_tally import PLAIN_REASONS
from phonograph.graphs.planning.settings import ask
from phonograph.server.observe import exposition
from phonograph.server.observe.exposition import Exposition
from phonograph.server.observe.histogram import Distribution
from phonograph.server.observe.history import LATENCY_WINDOW, MAX_POINTS, History
from phonograph.server.observe.incidents import Incidents
from phonograph.server.observe.metrics import Metrics
from phonograph.server.observe.running_totals import StatsAcrossRestarts

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def make(decode: str = "full", prefill: str = "full", limit: int = 4) -> LLM:
    options = EngineOptions(max_seqs=4, max_tokens=24, max_len=96, page_size=8, dtype=torch.float32)
    settings = {"decode.backend": decode, "prefill.backend": prefill, "decode.limit": limit}
    asked = [ask(name, value, origin="test") for name, value in settings.items()]
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)


def phases(llm: LLM) -> dict[str, PhaseStats]:
    return {phase.name: phase for phase in engine_stats(llm.core).phases}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


# -- the engine -----------------------------------------------------------------------------------------------


def test_stats_say_what_ran(llm: LLM) -> None:
    before = engine_stats(llm.core)
    llm.generate([[5, 9, 200], [7] * 20, [11]], GREEDY)
    stats = engine_stats(llm.core)
    assert stats.generated_tokens - before.generated_tokens == 18
    assert stats.prompt_tokens - before.prompt_tokens == 24
    assert stats.steps - before.steps == 6
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    decode, prefill = stats.phases[:2]
    assert (decode.name, decode.backend, decode.dim) == ("decode", "full", "seqs")
    assert [made.size for made in decode.recordings if not made.axes] == [1, 2, 4]
    four = next(made for made in decode.recordings if made.label == "decode[seqs=4]")
    assert (four.num_graphs, four.replays, four.used_rows, four.padded_rows) == (1, 5, 15, 5)
    assert prefill.replays == 1
    assert four.num_bytes > 0


def test_an_eager_step_has_its_reason_and_detail() -> None:
    llm = make(prefill="disabled", limit=2)
    llm.generate([[5, 9], [7], [8]], GREEDY)
    decode = phases(llm)["decode"]
    (why,) = decode.eager
    assert (why.reason, why.calls) == (Reason.TOO_LARGE.value, 5)
    assert why.detail == "3 seqs, the largest bucket is 2"
    assert (decode.eager_calls, decode.replays) == (5, 0)


def test_a_phase_without_graphs_says_so() -> None:
    llm = make("disabled", "disabled")
    llm.generate([[5, 9]], GREEDY)
    decode = phases(llm)["decode"]
    assert (decode.backend, decode.recordings) == ("disabled", ())
    assert [(why.reason, why.calls) for why in decode.eager] == [("disabled", 5)]


def test_a_failed_capture_is_a_recording_with_an_error() -> None:
    llm = make(prefill="disabled")
    runner = llm.executor.runners["decode"]
    body = runner.phase.body

    def reads_the_host(batch: Any) -> torch.Tensor:
        if len(batch.rows) == 2:
            int(batch.rows[0])
        return body(batch)

    object.__setattr__(runner.phase, "body", reads_the_host)
    runner.capture()
    failed = [made for made in phases(llm)["decode"].recordings if made.error]
    assert {made.size for made in failed} == {2}
    assert all("reads the device from the host" in made.error and not made.num_graphs for made in failed)


def test_device_seconds_go_to_their_phase(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("decode", "replay"): 1.5, ("decode", "eager"): 0.25, ("prefill", "replay"): 2.0}
    monkeypatch.setattr(StepTiming, "seconds", seconds)
    assert phases(llm)["decode"].device_seconds == {"replay": 1.5, "eager": 0.25}
    assert phases(llm)["prefill"].device_seconds == {"replay": 2.0}


def test_stats_can_be_sent(llm: LLM) -> None:
    stats = engine_stats(llm.core)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats
    assert pickle.loads(pickle.dumps(stats)) == stats


# -- distributions --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 200.0), min_size=1, max_size=200))
def test_published_counts_are_exact(values: list[float]) -> None:
    found = Distribution((0.001, 0.05, 1, 30))
    for value in values:
        found.observe(value)
    expected = [sum(value <= bound for value in values) for bound in (0.001, 0.05, 1, 30)]
    assert [count for _, count in found.cumulative()] == [*expected, len(values)]
    assert found.total == pytest.approx(sum(values))


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_quantiles_are_near_the_true_ones(share: float) -> None:
    values = np.random.default_rng(3).lognormal(-3, 1, 5000)
    found = Distribution((0.001, 0.05, 1, 30))
    for value in values:
        found.observe(value)
    assert found.quantile(share) == pytest.approx(float(np.quantile(values, share)), rel=0.08)


def test_quantiles_of_a_span_see_only_that_span() -> None:
    found = Distribution((0.001, 0.1, 10))
    for _ in range(100):
        found.observe(5.0)
    before = list(found.counts)
    assert found.quantile(0.5, before) is None
    for _ in range(10):
        found.observe(0.02)
    assert found.quantile(0.99, before) == pytest.approx(0.02, rel=0.1)
    assert found.quantile(0.5) == pytest.approx(5.0, rel=0.1)


def test_what_is_above_every_bound_is_told_as_the_last_bound() -> None:
    found = Distribution((0.1, 1))
    found.observe(50.0)
    assert found.quantile(0.5) == 1
    assert found.cumulative() == [("0.1", 0), ("1.0", 0), ("+Inf", 1)]


# -- total_stats of the core ----------------------------------------------------------------------------------------


def test_counters_go_on_when_the_core_is_started_again() -> None:
    total_stats = StatsAcrossRestarts()
    total_stats.take(statuses.stats(100), incarnation=0)
    total_stats.take(statuses.stats(5), incarnation=1)
    total = total_stats.total
    assert total is not None
    assert total_stats.restarts == 1
    assert total.generated_tokens == statuses.stats(100).generated_tokens + statuses.stats(5).generated_tokens
    assert total.running == statuses.stats(5).running
    assert total.phases[0].replays == statuses.stats(100).phases[0].replays + statuses.stats(5).phases[0].replays
    assert total.phases[0].device_seconds == {"replay": pytest.approx(0.71 * 105)}
    total_stats.take(statuses.stats(7), incarnation=2)
    assert total_stats.total is not None
    assert total_stats.total.steps == 200 * 112


def test_speculation_goes_on_too() -> None:
    total_stats = StatsAcrossRestarts()
    total_stats.take(statuses.stats(100), incarnation=0)
    first, second, both = (statuses.stats(seconds).speculation for seconds in (100, 5, 105))
    assert first is not None
    assert second is not None
    assert both is not None
    total_stats.take(statuses.stats(5, speculation=msgspec.structs.replace(second, times={})), incarnation=1)
    assert total_stats.total is not None
    assert total_stats.total.speculation == msgspec.structs.replace(both, times=first.times), "nothing timed yet"


def test_what_an_old_core_says_late_is_dropped() -> None:
    total_stats = StatsAcrossRestarts()
    total_stats.take(statuses.stats(3), incarnation=1)
    total_stats.take(statuses.stats(900), incarnation=0)
    assert total_stats.total == statuses.stats(3)


def test_a_core_that_is_gone_serves_nobody() -> None:
    total_stats = StatsAcrossRestarts()
    total_stats.take(statuses.stats(30), incarnation=0)
    total_stats.ended(0)
    assert total_stats.total is not None
    assert (total_stats.total.running, total_stats.total.waiting, total_stats.total.kv_use) == (0, 0, 0)
    assert total_stats.total.generated_tokens == statuses.stats(30).generated_tokens


# -- exposition -----------------------------------------------------------------------------------------------


def busy_metrics() -> Metrics:
    metrics = Metrics()
    metrics.started(Request("a", (1, 2, 3)))
    metrics.first_token(0.03)
    metrics.token_gap(0.012)
    metrics.token_gap(0.3)
    metrics.finished(FinishReason.LENGTH, 3, 2, 0, 0.34)
    metrics.rejected("queue_full")
    metrics.take(statuses.stats(40), incarnation=0)
    return metrics


def exposed(metrics: Metrics, model: str = "tiny") -> str:
    return Exposition(metrics, model, lambda: {"version": "1"}).text().decode()


def values(families: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    wanted = tuple(sorted({"model_name": "tiny", **labels}.items()))
    return values(parse(text))[f"phonograph:{name}", wanted]


def test_the_exposition_parses_and_says_what_was_counted() -> None:
    text = exposed(busy_metrics())
    stats = statuses.stats(40)
    assert value(text, "num_requests_running") == stats.running
    assert value(text, "generation_tokens_total") == stats.generated_tokens
    assert value(text, "prefix_cache_hits_total") == stats.prefix_hit_tokens
    assert value(text, "kv_cache_usage_perc") == stats.used_pages / stats.total_pages
    assert value(text, "request_success_total", finished_reason="length") == 1
    assert value(text, "request_success_total", finished_reason="stop") == 0
    assert value(text, "request_rejected_total", reason="queue_full") == 1
    assert value(text, "inter_token_latency_seconds_count") == 2
    assert value(text, "inter_token_latency_seconds_bucket", le="0.015") == 1
    assert value(text, "time_to_first_token_seconds_sum") == 0.03
    made = next(made for made in stats.phases[0].recordings if made.label == "decode[seqs=8, sampling=sampled]")
    labels = {"phase": "decode", "bucket": "8", "axes": "sampling=sampled"}
    assert value(text, "graph_replays_total", **labels) == made.replays > 0
    assert value(text, "graph_padded_rows_total", **labels) == made.replays * 8 - made.used_rows
    assert value(text, "device_seconds_total", phase="prefill", path="eager") == pytest.approx(0.4)
    assert value(text, "graph_capture_failures", phase="prefill") == 1
    assert value(text, "graph_products_left_out", phase="decode") == 0


def test_speculation_is_exposed() -> None:
    text, found = exposed(busy_metrics()), statuses.stats(40).speculation
    assert found is not None
    assert value(text, "spec_decode_num_drafts_total") == found.rounds
    assert value(text, "spec_decode_round_tokens_total") == found.tokens
    assert value(text, "spec_decode_num_probes_total") == found.probed > 0
    assert value(text, "spec_decode_probe_tokens_total") == found.probed_tokens > found.probed
    for place in range(3):
        at = {"position": f"{place}"}
        assert value(text, "spec_decode_num_draft_tokens_per_pos_total", **at) == found.drafted[place]
        assert value(text, "spec_decode_num_accepted_tokens_per_pos_total", **at) == found.accepted[place]
    page = (Path(exposition.__file__).parent / "page" / "speculation.js").read_text()
    for reason, meaning in PLAIN_REASONS.items():
        assert f"{reason}: {meaning}" in text, "in the help of the metric"
        assert f'{reason}: "{meaning}"' in page
        assert value(text, "spec_decode_plain_rounds_total", reason=reason) == found.plain[reason]
    for kind, time in found.times.items():
        assert value(text, "spec_decode_steps_total", kind=kind) == found.steps[kind]
        assert value(text, "spec_decode_passes_total", kind=kind) == time.passes
        assert value(text, "spec_decode_device_seconds_total", kind=kind) == pytest.approx(time.seconds)


def test_every_reason_is_there_from_the_start() -> None:
    text = exposed(busy_metrics())
    for reason in Reason:
        assert value(text, "eager_steps_total", phase="decode", reason=reason.value) >= 0
    assert value(text, "eager_steps_total", phase="prefill", reason="capture failed") == 40 // 3


def test_before_the_core_says_anything_there_are_only_requests() -> None:
    text = exposed(Metrics())
    assert value(text, "requests_total") == 0
    assert "num_requests_running" not in text


def test_labels_are_escaped() -> None:
    found = values(parse(exposed(busy_metrics(), 'a"b\\c\nd')))
    assert found["phonograph:requests_total", (("model_name", 'a"b\\c\nd'),)] == 1


def test_no_counter_goes_backwards_over_a_restart() -> None:
    metrics = busy_metrics()
    before = values(f for f in parse(exposed(metrics)) if f.type in ("counter", "histogram"))
    metrics.core_stats.ended(0)
    metrics.take(statuses.stats(1), incarnation=1)
    after = values(f for f in parse(exposed(metrics)) if f.type in ("counter", "histogram"))
    ours = {name for name in before if name[0].startswith("phonograph:")}
    assert len(ours) > 100
    assert [name for name in ours if after[name] < before[name]] == []


def test_every_metric_is_documented_and_nothing_else() -> None:
    names = set(re.findall(r"^# TYPE (phonograph:\w+)", exposed(busy_metrics()), re.M))
    assert set(re.findall(r"`(phonograph:\w+)`", DOCS.read_text())) == names


# -- history and incidents ------------------------------------------------------------------------------------


def test_a_sample_has_the_rates_of_its_second() -> None:
    metrics = Metrics()
    history = History(metrics)
    metrics.take(statuses.stats(0, clock=10.0, generated_tokens=100, prompt_tokens=50), incarnation=0)
    history.tick(1000.0)
    metrics.take(statuses.stats(0, clock=12.0, generated_tokens=300, prompt_tokens=60), incarnation=0)
    metrics.token_gap(0.02)
    history.tick(1001.0)
    history.tick(1002.0)
    first, second, third = history.since(0).rows
    assert (first.output_rate, second.output_rate, third.output_rate) == (0, 100, 0)
    assert second.prompt_rate == 5
    assert second.token_gap_p50 == pytest.approx(0.02, rel=0.1)
    assert (first.token_gap_p50, third.token_gap_p50, second.first_token_p50) == (None, None, None)


def test_after_a_sleep_only_the_time_awake_counts() -> None:
    metrics = Metrics()
    history = History(metrics)
    metrics.take(statuses.stats(0, clock=10.0, generated_tokens=100, running=0, waiting=0), incarnation=0)
    history.tick(1000.0)
    metrics.take(statuses.stats(0, clock=70.0, generated_tokens=150), incarnation=0)
    history.tick(1001.0)
    assert history.since(1).rows[0].output_rate == 50


def test_history_is_bounded_and_numbered() -> None:
    history = History(Metrics())
    for second in range(MAX_POINTS + 50):
        history.tick(float(second))
    everything = history.since(0)
    assert (everything.first, len(everything.rows)) == (50, MAX_POINTS)
    few = history.since(MAX_POINTS + 48)
    assert (few.first, [row.at for row in few.rows]) == (MAX_POINTS + 48, [MAX_POINTS + 48, MAX_POINTS + 49])
    assert history.since(MAX_POINTS + 50).rows == ()
    assert history.since(10**9).first == MAX_POINTS + 50


def test_latencies_are_of_the_last_minute() -> None:
    metrics = Metrics()
    history = History(metrics)
    metrics.first_token(9.0)
    assert history.latencies()[0].p50 == pytest.approx(9.0, rel=0.1)
    for second in range(LATENCY_WINDOW):
        history.tick(float(second))
    metrics.first_token(0.05)
    first_token, token_gap, _ = history.latencies()
    assert first_token.count == 1
    assert first_token.p99 == pytest.approx(0.05, rel=0.1)
    assert (token_gap.count, token_gap.p50) == (0, None)


def test_incidents_are_the_newest_warnings_and_repeats_only_count() -> None:
    incidents = Incidents()
    logger = logging.Logger("test")
    logger.addHandler(incidents)
    logger.info("not shown")
    for _ in range(3):
        logger.warning("page %d", 4)
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("x" * 600)
    newest, repeated = incidents.newest()
    assert (repeated.text, repeated.level, repeated.count) == ("page 4", "warning", 3)
    assert newest.level == "error"
    assert len(newest.text) == 500
    words = [a + b for a in "abcdefghij" for b in "abcdefgh"]
    for word in words:
        logger.error("the word %s", word)
    assert [one.text for one in incidents.newest()][:2] == ["the word jh", "the word jg"]
    assert len(incidents.newest()) == 50


def test_a_flood_of_incidents_of_one_kind_pushes_nothing_off() -> None:
    incidents = Incidents()
    logger = logging.Logger("test")
    logger.addHandler(incidents)
    logger.error("the engine core is down: the engine core was ended by SIGKILL")
    for number in range(400):
        logger.warning(
            "step %d failed (OverflowError: %r); trying its sequences one by one", number, "x" * (number % 7)
        )
    for word in (a + b for a in "abcdefghij" for b in "abcdefgh"):
        logger.warning("a warning of its own: %s", word)
    kept = incidents.newest()
    assert [one.text for one in kept if "SIGKILL" in one.text]
    assert len(kept) == 50
    flood = [one for one in kept if one.text.startswith("step ")]
    assert [one.count for one in flood] in ([400], [])
