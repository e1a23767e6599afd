"""The plot of backends: from lines as bench/one_engine.py prints them, some of which are missing."""

from __future__ import annotations

import json
from pathlib import Path

from piecewise_plot import draw


def test_backends_that_were_measured_are_drawn(tmp_path: Path) -> None:
    line = {
        "decode": {"1": {"wall_ms": 3.875}, "32": {"wall_ms": 4.9}},
        "prefill": {"1 of 128": {"device_ms": 5.7}},
        "w1_tokens_s": [11_000.0, 11_128.6],
    }
    measured = ("native full", "native tc_piecewise warm", "adapter disabled")
    lines = [*({"label": label, **line} for label in measured), {"label": "native tc_piecewise cold"}]
    results = tmp_path / "found.json"
    results.write_text(json.dumps({"machine": {"accelerator": "some GPU"}, "lines": lines}))
    draw(results, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count("<!-- 11,129 -->") == 3
    assert drawn.count("<!-- 3.88 -->") == 3
    assert "tc_piecewise" in drawn
    assert "some GPU" in drawn
