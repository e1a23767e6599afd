"""Peers: found in a folder, run with a time limit, their figures kept; with scripts of the test's own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from phonograph import PlanError
from phonograph.bench.peers import measure_peers, results_in
from phonograph.bench.processes import run_command

SCRIPT = """
import json, sys
import packed
config = json.load(open(sys.argv[1] + "/config.json"))
json.dump({"W1_tok_s": packed.RATE, "config": config["size"]}, open(sys.argv[2], "w"))
"""


def asked(folder: Path | None) -> argparse.Namespace:
    return argparse.Namespace(peers=folder, transformers=False, compile=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A peer `vllm` as a pack, whose script imports a module of it, and a config of one shape."""
    made = tmp_path / "peers"
    (made / "tiny").mkdir(parents=True)
    (made / "tiny" / "config.json").write_text('{"size": 3}')
    (made / "peer_vllm.py").write_text(SCRIPT)
    for name, content in (("vllm", {"vllm/packed.py": "RATE = 10.5"}), ("extras", {"extras/more.py": ""})):
        source = tmp_path / f"source_{name}"
        for path, text in content.items():
            (source / path).parent.mkdir(parents=True)
            (source / path).write_text(text)
        packed = made / f"{name}_pack.tar.xz"
        subprocess.run(["tar", "cJf", str(packed), "-C", str(source), name], check=True)
    return made


def test_a_pack_is_unpacked_and_run_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert measure_peers(asked(folder), "tiny", out, 60) == {}
    assert results_in(out) == {"vllm": {"W1_tok_s": 10.5, "config": 3}}
    kept = json.loads((out / "peer_vllm.json").read_text())
    assert kept["machine"]["python"]
    (folder / "peer_vllm.py").write_text("raise SystemExit(1)")
    assert measure_peers(asked(folder), "tiny", out, 60) == {}


def test_what_went_wrong_is_told(folder: Path, tmp_path: Path) -> None:
    assert "no config.json for the shape 'huge'" in measure_peers(asked(folder), "huge", tmp_path, 60)["vllm"]
    (folder / "peer_vllm.py").write_text("raise ValueError('no such kernel')")
    assert "no such kernel" in measure_peers(asked(folder), "tiny", tmp_path, 60)["vllm"]
    assert measure_peers(asked(folder), "tiny", tmp_path, 0) == {"vllm": "not measured, out of time"}
    assert results_in(tmp_path) == {}
    with pytest.raises(PlanError, match="is there"):
        measure_peers(asked(tmp_path / "source_vllm"), "tiny", tmp_path, 60)


def test_a_command_ends_at_its_time_limit_and_keeps_what_it_printed(tmp_path: Path) -> None:
    code = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    done = run_command([sys.executable, "-c", code], seconds=1.0, log=tmp_path / "log")
    assert done.timed_out
    assert done.output == "begun\n"
    assert "time limit" in done.failure
    assert done.seconds < 30


def test_a_command_gets_its_environment_beside_ours(tmp_path: Path) -> None:
    code = "import os; print(os.environ['GIVEN'], bool(os.environ['PATH']))"
    done = run_command([sys.executable, "-c", code], seconds=60, log=tmp_path / "log", environment={"GIVEN": "yes"})
    assert done.output == "yes True\n"
    assert done.failure == ""
