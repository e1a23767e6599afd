"""Every measurement in its quick form: it runs, and its file has what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phonograph.bench.commands import BY_NAME
from phonograph.cli.main import main

Capture = pytest.CaptureFixture[str]


def measured(name: str, out: Path, *flags: str) -> dict[str, Any]:
    assert main(["bench", name, "--quick", "--device", "emulated", "--out", str(out), *flags]) == 0
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert found["measurement"]["name"] == name
    assert found["status"] == "complete"
    assert {"accelerator", "python", "torch", "date", "command"} <= found["machine"].keys()
    assert found["settings"]["shape"] == "tiny"
    # A slope is a difference of two short runs here.
    assert all(row["value"] > 0 for row in found["rows"] if row["case"].get("by") != "slope")
    return found


def series(found: dict[str, Any], **case: int | str) -> dict[str, dict[str, Any]]:
    rows = [row for row in found["rows"] if all(row["case"].get(key) == value for key, value in case.items())]
    return {row["series"]: row for row in rows}


def test_decode_step(tmp_path: Path, capsys: Capture) -> None:
    found = measured("decode_step", tmp_path)
    for num_seqs in (1, 2):
        rows = series(found, seqs=num_seqs, by="events")
        assert rows.keys() == {"floor", "full", "eager"}
        assert rows["full"]["figures"].keys() >= {"wall_ms", "host_us", "idle_share", "context", "p10_ms", "p90_ms"}
        assert rows["full"]["figures"]["context"] == f"{41 - num_seqs} to {46 - num_seqs}"
        assert rows["floor"]["figures"].keys() == {"gemms_ms", "kv_ms"}
        assert series(found, seqs=num_seqs, by="slope").keys() == {"floor", "full"}
    assert found["facts"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert not [note for note in found["notes"] if "eagerly" in note]
    assert "full / floor" in capsys.readouterr().out


def test_prefill(tmp_path: Path) -> None:
    found = measured("prefill", tmp_path, "--backends", "full,disabled")
    for num_requests in (1, 2):
        for prefix in (0, 16):
            for how in ("step", "end to end"):
                rows = series(found, tokens=8, requests=num_requests, prefix=prefix, by=how)
                assert rows.keys() == {"floor", "full", "eager"}
    assert not [note for note in found["notes"] if "prefix cache" in note or "eagerly" in note]


def test_throughput(tmp_path: Path) -> None:
    found = measured("throughput", tmp_path)
    rows = series(found, workload="W1")
    assert rows.keys() == {"ceiling", "full", "eager"}
    assert rows["full"]["figures"]["output_tokens"] == 4 * 8
    assert rows["full"]["figures"]["preemptions"] == 0
    mixed = series(found, workload="mix at 40/s")["full"]["figures"]
    assert {f"{kind}_p{percent}_ms" for kind in ("ttft", "itl") for percent in (50, 95, 99)} <= mixed.keys()


def test_capture(tmp_path: Path) -> None:
    found = measured("capture", tmp_path)
    decode, prefill = series(found, phase="decode"), series(found, phase="prefill")
    assert decode["full"]["figures"]["recordings"] == 3 * 3
    assert decode["full"]["figures"]["products"].keys() == {"plain", "sampling=sampled", "sampling=detailed"}
    assert prefill["breakable"]["figures"]["graphs"] > prefill["full"]["figures"]["graphs"]
    assert prefill["full"]["figures"]["failed"] == 0
    assert found["facts"]["all_full"]["recordings"] == 9 + prefill["full"]["figures"]["recordings"]


def test_breaks(tmp_path: Path) -> None:
    found = measured("breaks", tmp_path, "--rounds", "1")
    assert series(found, what="370 small kernels").keys() == {"full", "breakable"}
    assert found["facts"]["one_break_us"].keys() == {"370 small kernels", "prefill of 8 tokens, 1 request"}


def test_cold_start(tmp_path: Path) -> None:
    found = measured("cold_start", tmp_path)
    parts = {row["case"]["part"]: row["value"] for row in found["rows"]}
    assert parts.pop("all") == pytest.approx(sum(parts.values()), rel=0.05)
    assert parts.keys() >= {"import torch", "make weights", "size the KV cache", "capture", "first token"}


def test_all_notes_what_failed_and_what_there_was_no_time_for(tmp_path: Path) -> None:
    flags = ["--only", "host_time", "--quick", "--device", "emulated", "--minutes", "2", "--out", str(tmp_path)]
    # An engine without pages: what needs one fails, and says so.
    assert main(["bench", "all", *flags, "--option", "page_size=0"]) == 1
    entries = json.loads((tmp_path / "all.json").read_text())["measurements"]
    assert entries["host_time"]["status"] == "failed"
    assert "page_size" in entries["host_time"]["problem"]
    found = json.loads((tmp_path / "host_time.json").read_text())
    assert found["status"] == "failed"
    assert series(found, what="a call, values in numpy").keys() == {"full", "floor"}
    assert main(["bench", "all", *flags, "--minutes", "0"]) == 0
    assert json.loads((tmp_path / "all.json").read_text())["measurements"]["host_time"]["status"] == "skipped"


def test_out_of_time_is_noted(tmp_path: Path) -> None:
    assert main(["bench", "decode_step", "--quick", "--time-limit", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decode_step.json").read_text())
    assert found["status"] == "partial"
    assert not found["rows"]
    assert "not measured, out of time: decode steps, full" in found["notes"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["decode_step", "--quick", "--option", "max_seq=3"], "expected NAME=VALUE with one of max_seqs"),
        (["decode_step", "--quick", "--option", "dtype=int3"], "expected one of bfloat16"),
        (["decode_step", "--shape", "gpt-9"], "known: qwen3-8b"),
        (["all", "--only", "decodestep", "--out", "nowhere"], "expected some of decode_step"),
        (["table", "nowhere"], "is no folder"),
    ],
)
def test_bad_input_says_what_to_do(flags: list[str], says: str, capsys: Capture) -> None:
    assert main(["bench", *flags]) == 2
    assert says in capsys.readouterr().err


def test_every_measurement_is_offered(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in [*BY_NAME, "all", "table"])


def test_the_page_has_a_place_for_every_measurement() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    for name in BY_NAME:
        assert f"| `{name}` |" in page
        assert f"<!-- bench: {name} -->" in page
