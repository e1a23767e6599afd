"""Choices of kernels: what is measured is found again, and what can't be used is survived and said."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phonograph.devices import open_device
from phonograph.engine.ops import tuning
from phonograph.engine.ops.layers.candidates import candidates, variations
from phonograph.engine.ops.tuning import Choice, Product, Tuning, by_rule
from phonograph.settings import cache_folder

GPU = "NVIDIA Test"
ONE = Product("linear", 1, 64, 32)
SOME = Product("linear", 8, 64, 32)
VECTOR = Choice("vector", rows=4, block=32, programs=8)
MATRIX = Choice("matrix", rows=16, block=32, split=2, swap=True)


def written(folder: Path, **changes: object) -> Path:
    """A good cache file, with these of its fields changed."""
    path = tuning.save({ONE: VECTOR}, GPU, next_to(folder))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def next_to(folder: Path) -> Path:
    now = tuning.versions()
    return folder / f"kernels-torch-{now['torch']}-triton-{now['triton']}.json"


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    path = tuning.save({ONE: VECTOR}, GPU, next_to(tmp_path / "new" / "folder"))
    tuning.save({SOME: MATRIX, replace(ONE, dtype=torch.float16): MATRIX}, GPU, path)
    tuning.save({ONE: MATRIX}, "another GPU", path)
    found = tuning.load(GPU, path.parent)
    assert found.measured == {ONE: VECTOR, SOME: MATRIX, replace(ONE, dtype=torch.float16): MATRIX}
    tuning.save({ONE: MATRIX}, GPU, path)
    assert tuning.load(GPU, path.parent).choose(ONE) == MATRIX
    assert not list(path.parent.glob("*.tmp"))


def test_a_choice_serves_all_tokens_up_to_its_own() -> None:
    found = Tuning({ONE: VECTOR, SOME: MATRIX, replace(SOME, tokens=16): Choice("library_lt")})
    for tokens, wanted in (
        (1, "vector"),
        (2, "matrix"),
        (8, "matrix"),
        (9, "library_lt"),
        (17, "library"),
        (0, "library"),
    ):
        assert found.choose(replace(ONE, tokens=tokens)).kind == wanted
    assert found.choose(replace(SOME, op="norm_linear")) == Choice("library")


@pytest.mark.parametrize("inputs", [1, 64, 576, 1536, 4096, 12288, 20000])
def test_without_measurements_one_token_has_a_kernel(inputs: int) -> None:
    product = replace(ONE, inputs=inputs)
    choice = Tuning({}).choose(product)
    tuning.check(product, choice)
    assert choice.kind == "vector"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 0}, "format 0"),
        ({"versions": {"torch": "1.0", "triton": "2.0"}}, "torch 1.0, triton 2.0"),
        ({"entries": None}, "TypeError"),
        ({"entries": [{"hardware": GPU}]}, "KeyError"),
        ({"entries": [{"hardware": GPU, "op": "linear", "tokens": 9, "outputs": 8, "inputs": 8, "dtype": "bfloat16",
                       "choice": {"kind": "vector", "rows": 4, "block": 8}}]}, "it takes 1 to 8"),
        ({"entries": [{"hardware": GPU, "op": "linear", "tokens": 1, "outputs": 8, "inputs": 8, "dtype": "bfloat16",
                       "choice": {"kind": "wizardry"}}]}, "wizardry"),
        ({"entries": [{"hardware": GPU, "op": "linear", "tokens": 1, "outputs": 8, "inputs": 8, "dtype": "bfloat16",
                       "choice": {"kind": "vector", "rows": 3, "block": 8}}]}, "powers of two"),
    ],
    ids=["format", "versions", "no entries", "half an entry", "too many tokens", "unknown kernel", "odd size"],
)  # fmt: skip
def test_a_file_that_can_not_be_used_is_survived_and_said(
    changes: dict[str, object], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, **changes)
    with caplog.at_level(logging.WARNING, "phonograph"):
        found = tuning.load(GPU, tmp_path)
    assert ONE not in found.measured
    assert said in caplog.text
    assert str(path) in found.notes[1]
    tuning.save({SOME: MATRIX}, GPU, path)  # and what is measured next replaces it
    assert tuning.load(GPU, tmp_path).measured[SOME] == MATRIX


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_broken_file_is_survived_and_said(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    next_to(tmp_path).write_text(content)
    with caplog.at_level(logging.WARNING, "phonograph"):
        assert tuning.load(GPU, tmp_path).measured == {}
    assert "can't be read" in caplog.text


def test_no_folder_is_no_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = tuning.load(GPU, tmp_path / "nowhere")
    assert found.measured == {}
    assert "nothing measured on this machine" in found.notes[1]
    assert not caplog.records


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.save({ONE: VECTOR}, GPU) == next_to(tmp_path / "phonograph")
    assert tuning.load(GPU).choose(ONE) == VECTOR
    for unset in ("", None):
        monkeypatch.setenv("XDG_CACHE_HOME", unset) if unset is not None else monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_folder() == Path.home() / ".cache" / "phonograph"


def test_the_shipped_table_can_be_read() -> None:
    assert "choices for NVIDIA H200 from" in tuning.read(tuning.SHIPPED, "NVIDIA H200")[1]


# -- measuring ------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_what_fails_is_noted() -> None:
    pytest.importorskip("triton")
    from phonograph.engine.ops.triton.measuring import best, measure_all

    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    one, two = replace(ONE, dtype=torch.float32), Product("norm_gated", 2, 16, 16, torch.float32)
    bad = Choice("vector", rows=1 << 22, block=1 << 22)  # a tile with more elements than Triton allows
    jobs = [(one, VECTOR), (two, Choice("matrix", rows=16, block=16)), (one, Choice("library")), (one, bad)]
    found = measure_all(device, [*jobs, (two, Choice("library"))])
    chosen = best(found)
    assert set(chosen) == {one, two}
    for product in chosen:
        times = {m.choice: m.us for m in found if m.product == product}
        assert chosen[product] == min(times, key=times.__getitem__)
    assert [m.choice for m in found if m.problem] == [bad]


def test_what_time_did_not_suffice_for_is_noted() -> None:
    pytest.importorskip("triton")
    from phonograph.engine.ops.triton.measuring import best, measure_all

    found = measure_all(open_device("cpu"), [(replace(ONE, dtype=torch.float32), VECTOR)], seconds=-1)
    assert [one.problem for one in found] == ["not measured: the -1 s were over"]
    assert best(found) == {}


PRODUCTS = [
    Product("norm_linear", 1, 6144, 4096), Product("norm_gated", 16, 12288, 4096), Product("linear", 64, 4096, 12288),
    Product("linear", 1, 49152, 576), Product("norm_gated", 3, 1536, 576), Product("linear", 128, 576, 1536),
    Product("linear", 200, 4096, 4096),
]  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_candidate_can_compute_its_product(product: Product) -> None:
    found = candidates(product, multiprocessors=132)
    assert len(found) == len(set(found))
    assert {"library", "library_lt"} <= {choice.kind for choice in found}
    for choice in found:
        tuning.check(product, choice)


def test_the_fastest_kernels_are_varied() -> None:
    product = PRODUCTS[0]
    timed = [(product, choice, float(us)) for us, choice in enumerate(candidates(product, 132))]
    timed.append((product, Choice("vector", rows=1, block=1), float("inf")))  # it failed
    varied = variations(timed)
    assert len(varied) == len(set(varied))
    assert {choice.overlap for _, choice in varied} == {"late", "early"}
    assert {choice.ahead for _, choice in varied} == {0, 4096}
    assert all(choice.block > 1 for _, choice in varied if choice.kind == "vector")
    for _, choice in varied:
        tuning.check(product, choice)


@pytest.mark.parametrize("inputs", [3584, 5120, 17_408, 25_600, 28_672])
def test_rows_that_fill_no_power_of_two_go_in_blocks_that_are_on_their_way_early(inputs: int) -> None:
    """One load at a time left the widest products at 60 % of the memory's bandwidth."""
    choice = by_rule(Product("linear", 1, 5120, inputs))
    assert (choice.kind, choice.block) == ("vector", 512)
    assert choice.stages >= 3


def test_what_was_measured_in_bfloat16_holds_for_float16() -> None:
    bfloat16, choice = Product("linear", 4, 576, 576, torch.bfloat16), Choice("matrix", rows=16, block=64)
    tuning = Tuning({bfloat16: choice})
    assert tuning.choose(replace(bfloat16, dtype=torch.float16)) == choice
    assert tuning.choose(replace(bfloat16, dtype=torch.float32)).kind == "library"
    own = replace(bfloat16, dtype=torch.float16)
    assert Tuning({bfloat16: choice, own: Choice("library_lt")}).choose(own).kind == "library_lt"


def test_vector_kernels_that_nothing_was_measured_for_overlap_where_the_device_can() -> None:
    product = Product("linear", 1, 5120, 25_600)
    assert Tuning({}).choose(product).overlap == "none"
    assert Tuning({}).choose(product, overlap="early").overlap != "none"


def test_norms_next_to_a_librarys_kernels_do_not_overlap() -> None:
    product = Product("norm_linear", 64, 5120, 25_600)
    assert Tuning({}).choose(product, overlap="early") == Choice("library")
