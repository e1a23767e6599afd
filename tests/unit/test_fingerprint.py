"""Fingerprints: a reproducer knows the weights that were served, and says where others are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixed_requests import served
from phonograph import LLM, EngineOptions
from phonograph.cli.main import main
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.fingerprint import difference, fingerprint
from phonograph.engine.execution.reproducer import Reproducer
from phonograph.engine.execution.rerun import rerun
from phonograph.engine.models.config import SHAPES
from phonograph.engine.process.arguments import EngineArguments
from phonograph.graphs.planning.settings import ask


@dataclass(frozen=True)
class Layer:
    data: torch.Tensor
    bias: torch.Tensor | None = None
    prepared: object = None
    eps: float = 1e-5


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Layer, ...]:
    drawn = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).to(dtype)

    return Layer(matrix(48, 64)), Layer(matrix(16, 8), matrix(16)), Layer(matrix())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_equal_weights_have_equal_fingerprints_and_others_do_not(dtype: torch.dtype) -> None:
    ours = fingerprint(weights(dtype=dtype))
    assert set(ours) == {"0.data", "1.data", "1.bias", "2.data"}
    assert difference(fingerprint(weights(dtype=dtype)), ours) == ""
    assert "4 weights have other values (the first: 0.data)" in difference(fingerprint(weights(1, dtype)), ours)


def test_layout_and_what_kernels_keep_for_themselves_do_not_count() -> None:
    (one,) = weights()[:1]
    other = Layer(one.data.t().contiguous().t(), prepared=torch.zeros(3))
    assert fingerprint((one,)) == fingerprint((other,))


def test_weights_of_another_kind_are_named_with_both() -> None:
    said = difference(fingerprint(weights()), fingerprint(weights(dtype=torch.float16)))
    assert said == "4 of 4 weights are of another kind (the first, 0.data: float32[48, 64], here float16[48, 64])"
    assert "(the first, 1.bias: float32[16], here not there)" in difference(
        fingerprint(weights()), fingerprint((weights()[0], Layer(weights()[1].data), weights()[2]))
    )


@given(shape=st.lists(st.integers(1, 40), min_size=0, max_size=3), share=st.floats(0.1, 1.0), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_tenth_of_the_values_changed_shows(shape: list[int], share: float, seed: int) -> None:
    """Of a small tensor, one value does."""
    drawn = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=drawn)
    count = max(1, int(share * tensor.numel()))
    changed = tensor.reshape(-1).clone()
    changed[torch.randperm(tensor.numel(), generator=drawn)[:count]] += 1
    assert fingerprint((tensor,)) != fingerprint((changed.reshape(shape),))


# -- the engine -------------------------------------------------------------------------------------------------


FLAGS = ["--shape", "tiny", "--device", "emulated", "--max-seqs", "4", "--max-step-tokens", "16", "--max-len", "64"]
FLAGS += ["--dtype", "float32"]


def opened(seed: int = 0, **options: Any) -> LLM:
    made = EngineOptions(max_seqs=4, max_tokens=16, max_len=64, dtype=torch.float32, verify="off", **options)
    asked = [ask("decode.buckets", (4,), origin="test")]
    return LLM(RandomCheckpoint(SHAPES["tiny"], seed), device="emulated", options=made, asked=asked)


def spoil(llm: LLM) -> None:
    runner = llm.executor.runners["decode"]
    for key in runner.captured:
        recording: Any = runner.recording(key)
        usual = recording.replay

        def spoiled(usual: Callable[[], None] = usual) -> None:
            usual()
            llm.executor.tables.last_token[1:] += 1

        recording.replay = spoiled


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    llm = opened(shadow_verify=1.0, shadow_dir=folder)
    spoil(llm)
    served(llm.limits, llm.executor)
    return sorted(folder.glob("decode-*.pt"))[0]


@pytest.mark.slow
def test_other_weights_of_the_same_shape_are_said(kept: Path) -> None:
    same = rerun(opened().executor, Reproducer.read(kept))
    assert (same.other_weights, same.is_verdict) == ("", True)
    llm = opened(seed=1)
    found = rerun(llm.executor, Reproducer.read(kept))
    first, second = str(found).splitlines()
    assert first.startswith("the weights here are not those that were served: ")
    assert "weights have other values (the first: embedding). Open it with the model that was" in first
    assert second.startswith("replay and eager give the same bits here")
    assert second.endswith(", which with other weights is inconclusive")
    assert not found.is_verdict
    spoil(llm)
    found = rerun(llm.executor, Reproducer.read(kept))
    assert found.is_verdict, "a fault that is there on other weights too is there"
    assert str(found).splitlines()[1].startswith("reproduced: ")


@pytest.mark.slow
def test_a_weight_that_was_changed_in_place_is_said(kept: Path) -> None:
    llm = opened()
    llm.executor.model.matrices[0].data.mul_(2)
    assert "1 of " in rerun(llm.executor, Reproducer.read(kept)).other_weights


@pytest.mark.slow
def test_the_command_says_it_and_its_status_is_no_verdict(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *FLAGS, "--replay", str(kept)]) == 0
    assert "weights" not in capsys.readouterr().out
    monkeypatch.setattr(EngineArguments, "checkpoint", lambda _: RandomCheckpoint(SHAPES["tiny"], seed=1))
    assert main(["verify", *FLAGS, "--replay", str(kept)]) == 2
    assert f"{kept}: the weights here are not those that were served" in capsys.readouterr().out


@pytest.mark.slow
def test_the_file_is_read_and_compared_before_weights_are_loaded(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(EngineArguments, "open", loaded)
    damaged, foreign, empty, older = (tmp_path / name for name in ("damaged", "foreign", "empty", "older"))
    damaged.write_bytes(kept.read_bytes()[:-100])
    torch.save({"layers.0.weight": torch.zeros(3)}, foreign)
    empty.touch()
    torch.save(torch.load(kept, weights_only=True) | {"format": 2}, older)
    for path, said in {
        tmp_path / "none": "No such file",
        tmp_path: "Is a directory",
        damaged: "its end is missing",
        foreign: "it is not a reproducer",
        empty: "it is empty",
        older: "it has the format 2, and this version of phonograph reads 4",
    }.items():
        assert main(["verify", *FLAGS, "--replay", str(path)]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert str(path) in shown.err
        assert shown.out == ""
    assert main(["verify", "--shape", "qwen3-8b", "--device", "emulated", "--replay", str(kept)]) == 2
    assert "it is of another model" in capsys.readouterr().err
