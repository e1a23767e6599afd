"""Reproducers: written within bounds and without harm, read with care, run again, and bisected over segments."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mixed_requests import served
from phonograph import LLM, CheckpointError, EngineOptions, VerifyError, current
from phonograph.cli.main import main
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution import reproducer_files
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.reproducer import Reproducer
from phonograph.engine.execution.rerun import Rerun, rerun
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.interface import Hidden
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.graphs.phases.context import Stage
from phonograph.graphs.phases.decisions import Reason
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.slow

NUM_LAYERS = 3
SHAPE = replace(SHAPES["tiny"], num_layers=NUM_LAYERS)


def opened(backend: str = "full", shape: Any = SHAPE, buckets: tuple[int, ...] = (16,), **options: Any) -> LLM:
    usual: dict[str, Any] = {
        "max_seqs": 4,
        "max_tokens": 16,
        "max_len": 64,
        "page_size": 4,
        "cache_tokens": 128,
        "max_ahead": 2,
    }
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    asked += [ask("decode.buckets", (4,), origin="test"), ask("prefill.buckets", buckets, origin="test")]
    made = EngineOptions(**(usual | {"dtype": torch.float32, "verify": "off"} | options))
    return LLM(RandomCheckpoint(shape), device="emulated", options=made, asked=asked)


def again(executor: Executor, path: Path) -> Rerun:
    return rerun(executor, Reproducer.read(path))


def generated(llm: LLM) -> list[list[int]]:
    return [sequence.outputs for sequence in served(llm.limits, llm.executor)[0]]


Fault = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def always(value: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    return value * -3 + 5


def with_padding(value: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """In the batches alone that have a padded row."""
    return torch.where(is_padding.any(), always(value, is_padding), value)


def plant(monkeypatch: pytest.MonkeyPatch, layer: int, fault: Fault = always) -> None:
    """Record something else than what runs, in one layer; the one past the last is what comes after all of them."""
    rotate, hidden = ReferenceKernels.rotate_and_store, Decoder.hidden

    def rotated(self: Any, qkv: Any, heads: Any, places: Any, cache: Any, number: int, out: Any = None) -> Any:
        if current().stage is Stage.CAPTURING and number == layer:
            qkv = fault(qkv, places.slots < cache.page_size)
        return rotate(self, qkv, heads, places, cache, number, out)

    def computed(self: Any, inputs: Any, queries: Any, *rest: Any, **named: Any) -> Hidden:
        found = hidden(self, inputs, queries, *rest, **named)
        spoiled = current().stage is Stage.CAPTURING and layer == NUM_LAYERS
        return replace(found, states=fault(found.states, queries.rows == 0)) if spoiled else found

    monkeypatch.setattr(ReferenceKernels, "rotate_and_store", rotated)
    monkeypatch.setattr(Decoder, "hidden", computed)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A reproducer of each pass, without token ids, as a wrong engine wrote it."""
    folder = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, 1, with_padding)
        llm = opened(shadow_verify=1.0, shadow_dir=folder)
        generated(llm)
    return {phase: sorted(folder.glob(f"{phase}-*.pt"))[0] for phase in ("decode", "prefill")}


@pytest.fixture(scope="module")
def right() -> LLM:
    return opened()


def segment_of(found: Rerun) -> int | None:
    assert found.bisected is not None, str(found)
    return found.bisected.segment


# -- bisection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "fault"), [*((layer, always) for layer in range(NUM_LAYERS + 1)), (1, with_padding), (3, with_padding)]
)
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_the_segment_of_a_fault_is_named(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, backend: str, layer: int, fault: Fault
) -> None:
    plant(monkeypatch, layer, fault)
    llm = opened(backend)
    before = {name: tensor.clone() for name, tensor in llm.executor.tables._tensors.items()}
    for phase, path in files.items():
        found = again(llm.executor, path)
        assert found.mismatch is not None
        assert segment_of(found) == layer + 1, phase
        assert found.recorded_again == (backend == "full" or phase == "decode")
        gap = "GapAttention.attend" if phase == "prefill" else "before_attention"
        recorded = f"recorded again in {NUM_LAYERS + 1} segments: " if found.recorded_again else ""
        said = str(found).splitlines()[1]
        assert said.startswith(f"{recorded}segment {layer + 1} of {NUM_LAYERS + 1} is the first to differ, ")
        assert (f"before gap {layer + 1} ({gap}, layer={layer}, " in said) == (layer < NUM_LAYERS)
        assert (f"after gap {layer} ({gap}, layer={layer - 1}, " in said) == (layer > 0)
        assert ("gaps.py:" if phase == "prefill" else "layer_marks.py:") in said
    for name, values in before.items():
        assert torch.equal(llm.executor.tables[name][1:], values[1:]), name


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_where_nothing_differs_it_says_so(files: dict[str, Path], backend: str) -> None:
    llm = opened(backend)
    for path in files.values():
        found = again(llm.executor, path)
        assert (found.mismatch, found.bisected) == (None, None)
        assert str(found).startswith("replay and eager give the same bits here (on noise: ")


def test_a_recording_of_another_size_is_named(files: dict[str, Path]) -> None:
    llm = opened(buckets=(1, 2, 3, 4, 8))
    found = again(llm.executor, files["prefill"])
    assert found.mismatch is None
    assert re.search(r"the same bits here \(by prefill\[tokens=\d\]; the file is of prefill\[tokens=16\]: ", str(found))


def test_a_fault_of_one_recording_alone_is_told_from_one_of_the_pass(files: dict[str, Path]) -> None:
    llm = opened()
    runner = llm.executor.runners["decode"]
    for key in runner.captured:
        recording: Any = runner.recording(key)
        usual = recording.replay

        def spoiled(usual: Callable[[], None] = usual) -> None:
            usual()
            llm.executor.tables.last_token[1:] += 1

        recording.replay = spoiled
    found = again(llm.executor, files["decode"])
    assert found.mismatch is not None
    assert segment_of(found) is None
    assert "recorded again in 4 segments, nothing differs: the fault is in that one recording" in str(found)


FLAGS = ["--shape", "tiny", "--device", "emulated", "--max-seqs", "4", "--max-step-tokens", "16", "--max-len", "64"]
FLAGS += ["--dtype", "float32"]


@pytest.mark.faults
def test_the_command_says_the_segment_and_its_status_tells_the_three_ends_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patching:
        plant(patching, 1)
        generated(opened(shape=SHAPES["tiny"], shadow_verify=1.0, shadow_dir=tmp_path, page_size=16))
        found = sorted(tmp_path.glob("decode-*.pt"))[0]
        assert main(["verify", *FLAGS, "--replay", str(found)]) == 1
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith(f"{found}: reproduced: decode[seqs=4")
    assert second.startswith(f"{found}: recorded again in 3 segments: segment 2 of 3 is the first to differ, after gap")
    assert main(["verify", *FLAGS, "--replay", str(found)]) == 0
    assert f"{found}: replay and eager give the same bits here" in capsys.readouterr().out
    assert main(["verify", *FLAGS, "--replay", str(tmp_path / "none.pt")]) == 2
    assert "none.pt" in capsys.readouterr().err


# -- what is refused ----------------------------------------------------------------------------------------


def changed(path: Path, to: Path, **parts: Any) -> Path:
    torch.save(torch.load(path, weights_only=True) | parts, to)
    return to


def test_another_models_and_another_versions_are_refused(right: LLM, files: dict[str, Path], tmp_path: Path) -> None:
    other = opened(shape=replace(SHAPE, num_layers=2))
    with pytest.raises(VerifyError, match=r"decode-4.*of another model: num_layers is 3, here 2\. Open it with"):
        again(other.executor, files["decode"])
    for number in (0, 1, 2, 3, 5, None):
        path = changed(files["decode"], tmp_path / "other.pt", format=number)
        with pytest.raises(CheckpointError, match=f"has the format {number}, and this version of phonograph reads 4"):
            again(right.executor, path)


@pytest.mark.parametrize("limits", [{"page_size": 8}, {"max_len": 128}, {"max_seqs": 1, "max_tokens": 16}])
def test_other_limits_are_refused(files: dict[str, Path], limits: dict[str, Any]) -> None:
    llm = opened(**limits)
    with pytest.raises(VerifyError, match=r"decode-4.*Open it with"):
        again(llm.executor, files["decode"])


def test_another_dtype_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(VerifyError, match=r"a page of its cache is .*float32.*here .*float16"):
        again(opened(dtype=torch.float16).executor, files["decode"])


def test_damaged_files_are_refused(right: LLM, files: dict[str, Path], tmp_path: Path) -> None:
    whole, path = files["decode"].read_bytes(), tmp_path / "damaged.pt"
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        what = "it is damaged, or its end is missing" if end else "it is empty"
        with pytest.raises(CheckpointError, match=rf"damaged\.pt: {what}"):
            again(right.executor, path)
    refused = 0
    for place in range(100, len(whole), len(whole) // 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            found = again(right.executor, path)
        except (CheckpointError, VerifyError):
            refused += 1
        else:
            assert found.mismatch is None, "what lies between the parts of the file means nothing"
    assert refused > 10


BROKEN: list[dict[str, Any]] = [
    {"rows": torch.zeros(0, dtype=torch.int64)},
    {"rows": torch.tensor([0, 1])},
    {"rows": torch.tensor([1.0])},
    {"rows": "1"},
    {"pages": torch.tensor([3, 2])},
    {"cache": []},
    {"cache": [1]},
    {"columns": {"length": 3}},
    {"columns": {"nonsense": torch.zeros(1)}},
    {"phase": "idle"},
    {"phase": "nothing"},
    {"size": "4"},
    {"axes": [["sampling", "other"]]},
    {"model": {}},
    {"batch": {"rows": torch.tensor([77])}},
    {"batch": {"rows": torch.tensor([-1])}},
]


@pytest.mark.parametrize("parts", BROKEN, ids=lambda parts: repr(parts)[:40])
def test_files_whose_parts_do_not_fit_are_refused(
    right: LLM, files: dict[str, Path], tmp_path: Path, parts: dict[str, Any]
) -> None:
    path = changed(files["decode"], tmp_path / "broken.pt", **parts)
    with pytest.raises((CheckpointError, VerifyError), match=r"broken\.pt"):
        again(right.executor, path)


def test_nothing_in_a_file_is_run(right: LLM, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"phase": "decode", "rows": Evil(), "cache": []}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt: it is not a reproducer"):
        again(right.executor, tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


# -- what is written ----------------------------------------------------------------------------------------


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make(folder: Path, with_tokens: bool = False) -> LLM:
        plant(monkeypatch, 1)
        return opened(shadow_verify=1.0, shadow_dir=folder, shadow_tokens=with_tokens)

    return make


Wrong = Callable[..., LLM]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if "computed again" in record.getMessage())


def serves(llm: LLM, right: LLM) -> None:
    assert generated(llm) == generated(right)
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_wrong > 0
    assert llm.executor.runners["decode"].stats.eager[Reason.MISTRUSTED] > 0


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_writer(content: Any, file: Any) -> None:
    file.write(b"some of it")
    raise RuntimeError("[enforce fail at inline_container.cc:659] . unexpected pos 64 vs 0\nmore")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "failing", "sentence"),
    [
        ("torch.save", no_space, "No space left on device"),
        ("torch.save", broken_writer, r"\[enforce fail at inline_container.cc:659\] . unexpected pos 64 vs 0\)"),
        ("os.replace", no_space, "No space left on device"),
    ],
)
def test_a_failure_to_write_is_said_and_harms_nobody(
    right: LLM,
    wrong: Wrong,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    failing: Any,
    sentence: str,
) -> None:
    llm = wrong(tmp_path)
    monkeypatch.setattr(name, failing)
    serves(llm, right)
    assert re.search(rf"No reproducer: writing to {tmp_path} failed \({sentence}", said(caplog))
    assert list(tmp_path.iterdir()) == [], "nothing half is left"


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["a file", "closed", "below a file", "removed"])
def test_a_folder_that_cannot_be_written_harms_nobody(
    right: LLM, wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str
) -> None:
    """After the start, where it was tried."""
    folder = tmp_path / "above" / "folder"
    llm = wrong(folder)
    if kind == "a file":
        folder.rmdir()
        folder.touch()
    elif kind == "below a file":
        folder.rmdir()
        folder.parent.rmdir()
        folder.parent.touch()
    elif kind == "closed":
        folder.chmod(0o500)
        if os.access(folder, os.W_OK):  # root may write everywhere
            monkeypatch.setattr(os, "open", lambda *_, **__: no_permission())
    elif kind == "removed":
        saved = torch.save

        def removing(content: Any, file: Any) -> None:
            saved(content, file)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

        monkeypatch.setattr(torch, "save", removing)
    serves(llm, right)
    monkeypatch.undo()
    assert f"No reproducer: writing to {folder} failed (" in said(caplog)


def no_permission() -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.faults
def test_there_are_at_most_eight_files_and_partial_ones_count(
    right: LLM, wrong: Wrong, tmp_path: Path, caplog: Any
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.pt").touch()
        (tmp_path / f"{number}.part").touch()
    serves(wrong(tmp_path), right)
    assert len(list(tmp_path.iterdir())) == 8
    assert f"No reproducer: {tmp_path} has 8 already." in said(caplog)


@pytest.mark.faults
def test_a_gibibyte_is_not_passed(
    right: LLM, wrong: Wrong, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with open(tmp_path / "large.pt", "wb") as file:
        file.truncate((1 << 30) - 1000)  # takes no room on the disk
    llm = wrong(tmp_path)
    copied: list[Any] = []
    monkeypatch.setattr(reproducer_files.Reproducers, "_content", lambda *given: copied.append(given))
    serves(llm, right)
    assert [path.name for path in tmp_path.iterdir()] == ["large.pt"]
    assert not copied, "nothing is copied that has no room"
    assert f"bytes, and {tmp_path} may hold 1,073,741,824." in said(caplog)


def test_files_take_no_more_than_was_counted(right: LLM, files: dict[str, Path]) -> None:
    for phase, path in files.items():
        content, size = torch.load(path, weights_only=True), path.stat().st_size
        batch = rerun_batch(right, path)
        counted = reproducer_files._num_bytes(batch, right.executor.state, len(content["rows"]), len(content["pages"]))
        assert size <= counted, phase
        assert path.stat().st_mode & 0o077 == 0, "nobody else may read it"


def rerun_batch(llm: LLM, path: Path) -> Any:
    from phonograph.engine.execution.reproducer import Reproducer

    found = Reproducer.read(path)
    return found.batch(llm.executor.runners[found.phase])


TELLING = ("last_token", "counts", "prompted", "bias_ids", "bias", "allowed", "tokens")


@pytest.mark.faults
@pytest.mark.parametrize("with_tokens", [False, True])
def test_token_ids_are_in_files_and_log_only_where_that_is_allowed(
    right: LLM, wrong: Wrong, tmp_path: Path, caplog: pytest.LogCaptureFixture, with_tokens: bool
) -> None:
    llm = wrong(tmp_path, with_tokens)
    serves(llm, right)
    found = [torch.load(path, weights_only=True) for path in tmp_path.iterdir()]
    assert found
    telling = [value for one in found for name, value in {**one["columns"], **one["batch"]}.items() if name in TELLING]
    assert len(telling) >= len(found)
    assert any(bool(value.any()) for value in telling) == with_tokens
    words = [said(caplog), llm.explain(), *(one["detail"] for one in found)]
    about_tokens = [text.partition("output tokens differs")[2] for text in words if "output tokens differs" in text]
    assert len(about_tokens) > 2, "the fault is seen in a token"
    assert all(text.startswith(" by up to") == with_tokens for text in about_tokens)
