"""Failures of finish: a client is told whose fault it is that a choice did not end well."""

from __future__ import annotations

import pytest

from phonograph.engine.process.generation import Delta
from phonograph.engine.requests.request import FinishReason
from phonograph.server.http.failures import failure_of_finish


@pytest.mark.parametrize(
    ("error", "code", "blames"),
    [
        (
            "CoverageError: strict: decode has no graph for this batch: decode[seqs=4] is not to be trusted",
            "no_graph",
            0,
        ),
        ("ValueError: logits are not finite", "model_error", 1),
    ],
)
def test_a_missing_graph_is_not_the_requests_fault(error: str, code: str, blames: int) -> None:
    found = failure_of_finish(Delta(0, finish=FinishReason.ERROR, error=error), None)
    assert found is not None
    sent = found.event().decode()
    assert found.status == 500
    assert f'"code":"{code}"' in sent
    assert ("change the request" in sent) == bool(blames)
