"""Health in service: a recording that was found wrong is named, and under strict the server is degraded."""

from __future__ import annotations

import msgspec
import pytest

from phonograph.engine.process.health import Health, health_in_service
from phonograph.engine.process.statistics import CoverageStats, EngineStats, PhaseStats
from statuses import stats


def found(*, strict: bool, wrong: int, covered: int) -> EngineStats:
    """Figures of an engine of which some recordings were given back."""
    usual = stats(10)
    decode = usual.phases[0]
    made = tuple(
        msgspec.structs.replace(one, mistrusted=f"/secret/{one.label}.pt" if place < wrong else "")
        for place, one in enumerate(decode.recordings)
    )
    coverage = CoverageStats(1, 10, 1, 10, covered, 1, 2, ())
    phases: tuple[PhaseStats, ...] = (msgspec.structs.replace(decode, recordings=made, coverage=coverage),)
    return msgspec.structs.replace(usual, phases=(*phases, *usual.phases[1:]), is_strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_without_a_wrong_recording_it_is_ready(strict: bool) -> None:
    assert health_in_service(None) == Health("ready")
    assert health_in_service(found(strict=strict, wrong=0, covered=10)) == Health("ready")


def test_a_wrong_recording_is_named_where_its_batches_run_eagerly() -> None:
    health = health_in_service(found(strict=False, wrong=1, covered=8))
    assert health.state == "ready"
    assert "decode[seqs=1] differed" in health.reason


def test_a_strict_server_is_degraded_and_still_serving() -> None:
    health = health_in_service(found(strict=True, wrong=2, covered=8))
    assert (health.state, health.is_serving) == ("degraded", True)
    assert "decode[seqs=1], decode[seqs=2] differed" in health.reason
    assert "no_graph" in health.reason


def test_a_strict_server_whose_batches_have_all_another_recording_is_ready() -> None:
    health = health_in_service(found(strict=True, wrong=1, covered=10))
    assert health.state == "ready"
    assert "decode[seqs=1] differed" in health.reason


def test_it_names_a_few_recordings_and_no_file() -> None:
    reason = health_in_service(found(strict=True, wrong=6, covered=1)).reason
    assert " and 3 more differed" in reason
    assert "secret" not in reason
