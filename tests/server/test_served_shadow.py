"""A recording that goes wrong in a live server: nothing wrong is sent, and health, metrics and status page say so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from phonograph.cli.main import main
from server.conftest import Server, serving
from server.test_served_status import status_of

pytestmark = pytest.mark.slow

WRONG = "decode[seqs=2]"
ENGINE = (
    "--device",
    "emulated",
    "--dtype",
    "float32",
    "--max-seqs",
    "4",
    "--max-len",
    "128",
    "--max-step-tokens",
    "32",
)

PLANTED = """
import os, sys
if any("core_loop" in one or one == "--replay" for one in sys.orig_argv):
    from phonograph.engine.execution.executor import Executor
    capture = Executor.capture

    def captured(executor, progress=None):
        reports = capture(executor, progress)
        for runner in executor.runners.values():
            for key in runner.captured:
                if str(key) == os.environ["PLANTED_KEY"]:
                    recording = runner.recording(key)

                    def spoiled(usual=recording.replay):
                        usual()
                        if os.path.exists(os.environ["PLANTED_WHEN"]):
                            executor.tables.last_token[1:] += 1

                    recording.replay = spoiled
        return reports

    Executor.capture = captured
"""


@dataclass(frozen=True)
class Planted:
    """A server with a recording that is wrong from the moment on that a file is there."""

    server: Server
    when: Path
    folder: Path
    """For reproducers."""
    environment: Mapping[str, str]
    """In which other commands have the fault too."""

    def spoil(self) -> None:
        self.when.touch()


@contextmanager
def planted(tmp_path: Path, model: Path, *flags: str) -> Iterator[Planted]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PLANTED)
    when, folder = tmp_path / "wrong-now", tmp_path / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PLANTED_KEY", WRONG)
        patch.setenv("PLANTED_WHEN", str(when))
        checked = ("--shadow-verify", "1.0", "--shadow-dir", str(folder))
        with serving("--model", str(model), *ENGINE, "--port", "0", *checked, *flags) as server:
            yield Planted(server, when, folder, dict(os.environ))


def asked(n: int, **further: Any) -> dict[str, Any]:
    return {"prompt": [5, 9, 20, 3], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": n, **further}


def figure(server: Server, name: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"phonograph:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def until_told(server: Server) -> None:
    """The core says its figures four times a second."""
    end = time.monotonic() + 20
    while not figure(server, "shadow_mismatches_total"):
        assert time.monotonic() < end, "the mismatch is not told"
        time.sleep(0.05)


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_nothing_wrong_is_sent_and_all_figures_are_right(tmp_path: Path, tiny_model: Path) -> None:
    bodies = [asked(2), asked(1, logprobs=2), asked(2, presence_penalty=1.5), asked(1, prompt=[7, 8, 9])]
    with planted(tmp_path, tiny_model) as found:
        server = found.server
        wanted = [texts(server.post("/v1/completions", body)) for body in bodies]
        before = server.get("/health").json()
        assert before == {"status": "ready", "reason": ""}
        found.spoil()
        assert texts(server.post("/v1/completions", bodies[0])) == wanted[0]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(3):
                given = list(threads.map(lambda body: texts(server.post("/v1/completions", body)), bodies))
                assert given == wanted
        until_told(server)
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ready")
        assert f"replays of {WRONG} differed from the eager path" in health.json()["reason"]
        assert figure(server, "shadow_mismatches_total") == 1
        assert figure(server, "shadow_checks_total") > 20
        assert figure(server, "graph_recordings_mistrusted") == 1
        assert figure(server, "graph_capture_failures") == 0, "nothing failed to be captured"
        status = status_of(server)
        assert status.totals.shadow_mismatches == 1
        (kept,) = found.folder.iterdir()
        by_label = {made.label: made for phase in status.phases for made in phase.recordings}
        assert [label for label, made in by_label.items() if not made.is_there] == [WRONG]
        assert str(kept) in by_label[WRONG].mistrusted
        assert by_label[WRONG].error == ""
        (decode,) = (phase for phase in status.phases if phase.name == "decode")
        assert {why.reason for why in decode.eager} == {"mistrusted"}
        assert any("is computed again" in one.text and str(kept) in one.text for one in status.incidents)
        assert torch.load(kept, weights_only=True)["size"] == 2
    flags = ["verify", "--model", str(tiny_model), *ENGINE, "--replay", str(kept)]
    assert main(flags) == 0, "a fresh engine is right"


@pytest.mark.parametrize("flags", [(), ("--log-prompts",)], ids=["without texts", "with texts"])
def test_what_a_loaded_server_keeps_reproduces_where_the_fault_is(
    tmp_path: Path, tiny_model: Path, flags: tuple[str, ...]
) -> None:
    bodies = [asked(1, prompt=[3 + number, 7, 11]) for number in range(8)]
    with planted(tmp_path, tiny_model, *flags) as found:
        server = found.server
        wanted = [texts(server.post("/v1/completions", body)) for body in bodies]
        with ThreadPoolExecutor(2) as threads:
            under_way = [threads.submit(server.post, "/v1/completions", body) for body in bodies]
            found.spoil()
            assert [texts(one.result()) for one in under_way] == wanted
            while not list(found.folder.glob("*.pt")):  # two at a time, until both decode together
                assert [*threads.map(lambda body: texts(server.post("/v1/completions", body)), bodies)] == wanted
        (kept,) = found.folder.iterdir()
    assert bool(torch.load(kept, weights_only=True)["columns"]["last_token"].any()) == bool(flags)
    command = [sys.executable, "-m", "phonograph", "verify", "--model", str(tiny_model), *ENGINE, "--replay", str(kept)]
    again = subprocess.run(command, env=found.environment, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 1, again.stdout + again.stderr
    assert f"{kept.name}: reproduced: {WRONG}: " in again.stdout
    found.when.unlink()
    right = subprocess.run(command, env=found.environment, capture_output=True, text=True, timeout=240, check=False)
    assert right.returncode == 0, right.stdout + right.stderr


def test_a_strict_server_says_that_it_is_degraded_and_fails_by_name(tmp_path: Path, tiny_model: Path) -> None:
    with planted(tmp_path, tiny_model, "--graphs", "strict") as found:
        server = found.server
        wanted = texts(server.post("/v1/completions", asked(1)))
        found.spoil()
        assert texts(server.post("/v1/completions", asked(1))) == wanted, "one sequence has another recording"
        for _ in range(2):
            failed = server.post("/v1/completions", asked(2))
            assert failed.status_code == 500
            assert failed.json()["error"]["code"] == "no_graph"
        until_told(server)
        health = server.waits_until("/health", 503)
        assert health.json()["status"] == health.json()["error"]["code"] == "degraded"
        assert f"replays of {WRONG} differed from the eager path" in health.json()["reason"]
        assert "some requests fail" in health.json()["error"]["message"]
        assert str(found.folder) not in health.text, "it is open to everybody"
        assert texts(server.post("/v1/completions", asked(1))) == wanted, "who fits another recording is served"
        streamed = httpx.post(server.url + "/v1/completions", json=asked(2, stream=True), timeout=60)
        assert '"code":"no_graph"' in streamed.text
        (decode,) = (phase for phase in status_of(server).phases if phase.name == "decode")
        assert decode.coverage is not None
        assert any("are refused, mistrusted" in gap for gap in decode.coverage.gaps)
        assert decode.eager == (), "nothing ran eagerly"
        assert not any("one by one" in line for line in server.lines)
