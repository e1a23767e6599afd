"""A folder that has transformers' layers alone: `generate` and `serve` give the tokens of plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from adapted import SERVED, greedy, made, saved
from phonograph import LLM, EmulatedDevice
from phonograph.cli.main import main
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask
from server.conftest import Server, serving

PROMPT = "GET /A,B;C"
SIZES = ("--max-seqs", "2", "--max-len", "40", "--max-step-tokens", "16")
PIECES = ("--decode-graph-backend", "tc_piecewise", "--prefill-graph-backend", "tc_piecewise")
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(made(SERVED["GPT-2"]), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return open_checkpoint(folder).tokenizer().encode(PROMPT)


@pytest.fixture(scope="module")
def wanted(prompt: list[int]) -> list[int]:
    """What plain transformers says."""
    tokens = greedy(made(SERVED["GPT-2"]), prompt, NUM_TOKENS)
    assert 2 not in tokens  # which would end it
    return tokens


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving("--model", str(folder), "--device", "cpu", *SIZES, "--port", "0") as running:
        yield running


@pytest.mark.parametrize("flags", [("--device", "cpu"), pytest.param(("--device", "emulated"), marks=pytest.mark.slow)])
def test_generate(
    folder: Path, prompt: list[int], wanted: list[int], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--json", "--report"]
    status = main(["generate", "--model", str(folder), "--prompt", PROMPT, *asked, *SIZES, *flags])
    told = capsys.readouterr()
    assert status == 0, told.err
    found = json.loads(told.out)
    assert (found["tokens"], found["prompt_tokens"]) == (wanted, len(prompt))
    assert "model: hf: GPT2LMHeadModel of transformers " in told.err


def test_serve(server: Server, folder: Path, prompt: list[int], wanted: list[int]) -> None:
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
    assert server.tokens(PROMPT) == prompt
    text = open_checkpoint(folder).tokenizer().decode(wanted)
    for given in (PROMPT, prompt):
        said = server.post("/v1/completions", {**body, "prompt": given})
        assert said.status_code == 200, said.text
        assert said.json()["choices"][0]["text"] == text
    assert any("hf: GPT2LMHeadModel of transformers " in line for line in server.lines)


def test_native_layers_are_not_there_for_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model-impl", "native", "--device", "cpu")
    assert main(["generate", "--model", str(folder), "--prompt", PROMPT, *flags]) == 2
    assert "supported are LlamaForCausalLM" in capsys.readouterr().err


def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the layers of GPT-2 do what no trace holds."""
    import torch
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    forward = GPT2MLP.forward

    def breaking(self: Any, states: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, states)

    monkeypatch.setattr(GPT2MLP, "forward", breaking)


@pytest.mark.slow
def test_layers_that_no_trace_holds_are_recorded_as_breakable_does_only_where_that_is_asked_for(
    folder: Path, wanted: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch)
    asked = ["--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--json", "--report"]
    found = {}
    for fallback in ((), ("--tc-fallback",)):
        flags = [*SIZES, "--device", "emulated", *PIECES, *fallback]
        assert main(["generate", "--model", str(folder), "--prompt", PROMPT, *asked, *flags]) == 0
        told = capsys.readouterr()
        assert json.loads(told.out)["tokens"] == wanted
        found[bool(fallback)] = told.err
    assert "is recorded as breakable does: " in found[True]
    assert "torch.compile can't trace this" in found[True]
    assert "0 eager calls" in found[True]
    assert "is recorded as breakable does" not in found[False]
    assert "capture failed" in found[False]


@pytest.mark.slow
def test_an_engine_falls_back_phase_by_phase(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings have the gaps of breakable, are verified, and serve every step."""
    interrupted(monkeypatch)
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=40, page_size=4)
    asked = [ask("tc_fallback", True, origin="test"), ask("prefill.backend", "tc_piecewise", origin="test")]
    llm = LLM(folder, device=EmulatedDevice(poison=True), options=options, asked=asked)
    prefill = llm.executor.runners["prefill"]
    assert prefill.captured
    assert {len(prefill.recording(key).graphs) for key in prefill.captured} == {3}
    assert [str(row.error) for report in llm.reports for row in report.failures] == []
    assert all(report.ok for report in llm.verified.values())
