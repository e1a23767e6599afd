"""MTP modules: what is drafted, what they keep beside the target, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from drafted import (
    DRAWN,
    GREEDY,
    PROMPTS,
    REQUESTS,
    expect_caught_up,
    expect_drafts,
    expect_plain_output,
    expect_plain_output_of_a_scarce_cache,
    expect_plain_output_to_the_end_of_the_context,
    expect_steady_rounds,
)
from mixed_steps import ENGINE, PLACES, Moment, Played, among_prompts
from phonograph import LLM, CheckpointError, EngineOptions, PlanError, SamplingParams
from phonograph.engine.cache.groups import CacheGroup, page_bytes
from phonograph.engine.checkpoints.draft_head import drafted_for
from phonograph.engine.checkpoints.mtp import MtpCheckpoint
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.speculation import choose_drafter
from phonograph.engine.models.rope import rope_table
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.mtp import mtp
from phonograph.engine.passes.registry import PASSES, kept_by
from phonograph.engine.passes.target_verify import speculating_passes
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence as Seq
from phonograph.engine.scheduling.step_width import Planned
from phonograph.graphs.planning.settings import ask
from random_modules import HIDDEN, TARGET, config, tensors, written
from speculation import MAX_LEN, Driver, Switching, check, plain, plain_llm, speculating

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("modules"))


def drafting(folder: Path, depth: int = 3, unread_places: int = 0) -> Drafting:
    model = drafted_for(plain_llm().executor.model)
    return mtp(MtpCheckpoint.open(folder, TARGET).load(model, MAX_LEN + 16, depth), depth, unread_places)


# -- what is drafted ------------------------------------------------------------------------------------------


class ByHand:
    """The modules over whole sequences, without pages and without falling behind: as DeepSeek-V3's paper has them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.model = drafted_for(plain_llm().executor.model)
        self.count = count
        self.angles = rope_table(MtpCheckpoint.open(folder, TARGET).config, 200, torch.device("cpu"))

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.weights[f"{name}.weight"], 1e-5)

    def projected(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}_proj.weight"].T

    def turned(self, x: torch.Tensor, first: int) -> torch.Tensor:
        x, places = x.view(x.shape[0], -1, 16), slice(first, first + x.shape[0])
        half = torch.cat([x[..., 8:], x[..., :8]], -1)
        return x * self.angles.cos[places, None] + half * self.angles.sin[places, None]

    def states(self, index: int, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """A module's output at every position, from the tokens and states that are its inputs there.

        `index` positions that nobody knows come first, with key and value zero.
        """
        own = f"model.layers.{TARGET.num_layers + index}"
        embedded = self.model.weights.embedding[torch.tensor(tokens)]
        both = torch.cat([self.normed(embedded, f"{own}.enorm"), self.normed(hidden, f"{own}.hnorm")], 1)
        x = self.projected(both, f"{own}.eh")
        inner = self.normed(x, f"{own}.input_layernorm")
        q, k = (self.turned(self.projected(inner, f"{own}.self_attn.{name}"), index) for name in "qk")
        v = self.projected(inner, f"{own}.self_attn.v").view(len(tokens), -1, 16)
        k, v = (functional.pad(part, (0, 0, 0, 0, index, 0)).repeat_interleave(2, 1) for part in (k, v))
        sees = torch.ones(len(tokens), len(tokens) + index).tril(index).bool()
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.projected(mixed.transpose(0, 1).flatten(1), f"{own}.self_attn.o")
        inner = self.normed(x, f"{own}.post_attention_layernorm")
        gated = functional.silu(self.projected(inner, f"{own}.mlp.gate")) * self.projected(inner, f"{own}.mlp.up")
        return x + self.projected(gated, f"{own}.mlp.down")

    def likeliest(self, index: int, state: torch.Tensor) -> int:
        own = f"model.layers.{TARGET.num_layers + index}"
        head = self.weights.get(f"{own}.shared_head.head.weight")
        head = self.model.weights.head.values() if head is None else head
        return int((self.normed(state, f"{own}.shared_head.norm") @ head.T).argmax())

    def drafts(self, known: Sequence[int], depth: int) -> list[int]:
        computed, pages = len(known) - 1, torch.arange(1, 30)[None].repeat(2, 1)
        queries = Queries(torch.ones(computed).long(), torch.arange(computed), pages, tokens_per_row=None)
        cache = CacheGroup.empty(self.model.keeps, 40, 8, dtype=torch.float32, device=torch.device("cpu"))
        hidden = self.model.hidden(torch.tensor(known[:-1]), queries, cache).states
        said, last = list(known), min(self.count, depth) - 1
        for index in range(last):
            hidden = self.states(index, said[index + 1 :], hidden)
            said.append(self.likeliest(index, hidden[-1]))
        while True:
            found = self.states(last, said[last + 1 :], hidden)
            said.append(self.likeliest(last, found[-1]))
            if len(said) == len(known) + depth:
                return said[-depth:]
            hidden = torch.cat([hidden, found[-1:]])


@pytest.mark.parametrize(("count", "depth"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (3, 3), (3, 5)])
def test_drafts_are_those_of_the_modules_over_the_whole_sequence(tmp_path: Path, count: int, depth: int) -> None:
    """Whatever was rejected, cut into chunks, or computed among others."""
    folder = written(tmp_path, tensors(count, has_head=count != 2), count)
    by_hand = ByHand(folder, count)
    core = speculating(drafting(folder, depth), "disabled", max_ahead=0, prefix_cache=False, chunk=7)
    assert expect_drafts(core, depth, by_hand.drafts) > 60


class Turns:
    """Plain steps, then a round: modules keep up with what nothing was drafted for."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, 0

    def of(self, decodes: Any, chunks: Any = ()) -> Planned:
        self.calls += 1
        return Planned(1 if self.calls % 4 else self.most)

    def took(self, step: Any, updates: Any, probed: Any) -> None:
        pass


def test_drafts_after_plain_steps_are_the_same(folder: Path) -> None:
    by_hand = ByHand(folder, 2)
    core = speculating(drafting(folder), "disabled", max_ahead=0, prefix_cache=False, chunk=7)
    core.scheduler.width = turns = Turns(4)
    assert expect_drafts(core, 3, by_hand.drafts, lambda: turns.calls % 4 == 0) > 10


@pytest.mark.parametrize("plain", [1, 4, 9])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_modules_catch_up_with_plain_steps(tmp_path: Path, count: int, plain: int) -> None:
    folder = written(tmp_path, tensors(count), count)
    usual: dict[str, Any] = {"max_ahead": 0, "prefix_cache": False, "chunk": 7, "unread_places": 4}
    core = speculating(drafting(folder, unread_places=4), "disabled", **usual)
    expect_caught_up(core, 3, plain, ByHand(folder, count).drafts)


@among_prompts
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_after_plain_steps_among_prompts_are_the_same(
    tmp_path: Path, moments: list[Moment], backend: str, count: int
) -> None:
    folder = written(tmp_path, tensors(count), count)
    core = speculating(drafting(folder, unread_places=PLACES), backend, **ENGINE)
    assert Played(core, ByHand(folder, count).drafts).play(moments).num_seen > 1


@pytest.mark.parametrize("count", [2, 3])
def test_drafts_after_narrow_rounds_are_the_same(tmp_path: Path, count: int) -> None:
    folder = written(tmp_path, tensors(count), count)
    core = speculating(drafting(folder), "disabled", max_ahead=0, prefix_cache=False, chunk=7, narrows=True)
    core.scheduler.width = widths = Switching((2, 2, 4), every=1)
    assert expect_drafts(core, 3, ByHand(folder, count).drafts, lambda: widths.calls % 3 == 2) > 10


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled", "tc_piecewise"])
def test_output_is_that_of_plain_decoding(folder: Path, backend: str) -> None:
    expect_plain_output(drafting(folder), backend)


def test_second_turns_over_the_prefix_cache(folder: Path) -> None:
    core = speculating(drafting(folder), "disabled", page_size=4, num_pages=200)
    driver = Driver(core)
    for length in range(9, 17):
        turn = (tuple(range(30, 30 + length)), replace(DRAWN, max_tokens=13))
        first = driver.run([turn])
        check(first)
        hits = core.scheduler.counts.prefix_hit_tokens
        check(driver.run([((*first[0].request.prompt, *first[0].outputs, 3, 1), turn[1])]))
        assert core.scheduler.counts.prefix_hit_tokens - hits >= (length + 8) // 4 * 4


def test_requests_that_are_given_up(folder: Path) -> None:
    core = speculating(drafting(folder), "disabled", max_ahead=3)

    def act(moment: int, sequences: list[Seq]) -> None:
        if moment in (3, 8, 11) and sequences:
            core.cancel(sequences[-1].request.id)

    found = Driver(core, every=2).run(REQUESTS, act)
    gone = [one for one in found if one.finish is FinishReason.CANCELLED]
    assert gone
    for one in gone:
        assert tuple(one.outputs) == plain(one.request.prompt, one.request.params).tokens[: len(one.outputs)]
    check([one for one in found if one.finish is not FinishReason.CANCELLED])


def test_a_scarce_cache(folder: Path) -> None:
    expect_plain_output_of_a_scarce_cache(drafting(folder))


def test_all_of_the_context_is_used(tmp_path: Path) -> None:
    expect_plain_output_to_the_end_of_the_context(drafting(written(tmp_path, count=3), 5))


def test_weights_without_sense_change_no_output(tmp_path: Path) -> None:
    """States overflow: keys, values and drafts that are NaN stay the drafter's own."""
    wild = {name: tensor * 1e30 if "eh_proj" in name else tensor for name, tensor in tensors().items()}
    check(Driver(speculating(drafting(written(tmp_path, wild)), "full")).run(REQUESTS))


def test_the_recordings_are_right_and_a_steady_round_is_one_launch(folder: Path) -> None:
    expect_steady_rounds(drafting(folder, 2))


@pytest.mark.parametrize("backend", ["breakable", pytest.param("full", marks=pytest.mark.slow)])
def test_all_of_their_recordings_are_those_of_the_eager_path(folder: Path, backend: str) -> None:
    """What the first of several modules attends to is read by the next: by token, wherever a recording does so."""
    options = EngineOptions(
        max_seqs=1, max_tokens=16, max_len=64, page_size=16, dtype=torch.float32, verify="all", speculate="mtp",
        draft=folder, speculate_depth=2,
    )  # fmt: skip
    asked = [ask("prefill.backend", backend, origin="test")]
    llm = LLM(RandomCheckpoint(TARGET), device="emulated", options=options, asked=asked)
    assert llm.verified["prefill"].ok
    [found] = llm.generate([list(PROMPTS[0])], GREEDY)
    assert tuple(found.tokens) == plain(PROMPTS[0], GREEDY).tokens


def test_a_page_costs_what_the_modules_keep_too(folder: Path) -> None:
    model, made = plain_llm().executor.model, drafting(folder)
    plain_bytes, both = (page_bytes(kept_by(model, one), 8, model.dtype) for one in (PASSES, speculating_passes(made)))
    assert both - plain_bytes == 2 * 8 * 2 * 3 * 16 * 4


def test_a_head_that_is_the_target_s_is_not_held_twice(tmp_path: Path) -> None:
    model = drafted_for(plain_llm().executor.model)
    own = {"model.layers.2.shared_head.head.weight": model.weights.head.values().clone()}
    files = MtpCheckpoint.open(written(tmp_path, {**tensors(), **own}), TARGET)
    first, second = files.load(model, MAX_LEN, 3).modules
    assert first.head is model.weights.head
    assert second.head is not model.weights.head


# -- which are refused ----------------------------------------------------------------------------------------


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("changes", "found", "said"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, None, "the architecture is DeepseekV3ForCausalLM; modules are"),
        ({"hidden_size": 32}, None, "its hidden size is 32, and the model's is 64"),
        ({"vocab_size": 300}, None, "its vocabulary is 300, and the model's is 256"),
        ({"num_nextn_predict_layers": 3}, None, "is 3, and 2 of its layers have an eh_proj"),
        ({"num_nextn_predict_layers": None}, None, "it has no num_nextn_predict_layers"),
        ({"attention_bias": True}, None, "biases"),
        ({"hidden_act": "gelu"}, None, "'gelu'; supported is silu in the layers of MTP modules. Give --draft another"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, None, "a sliding window of 4096"),
        ({}, without("model.layers.3.enorm.weight"), r"model\.layers\.3\.enorm\.weight is missing"),
        ({}, {**tensors(), "model.layers.2.mlp.experts.0.up_proj.weight": torch.zeros(1)}, "is no part of it"),
        ({}, {**tensors(), "model.layers.2.eh_proj.weight": torch.zeros(HIDDEN, HIDDEN)}, "has shape"),
        ({}, {**tensors(), "model.layers.2.enorm.weight": torch.zeros(HIDDEN).long()}, "is stored as I64"),
    ],
)
def test_modules_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], found: dict[str, torch.Tensor] | None, said: str
) -> None:
    folder = written(tmp_path, found, **changes)
    if changes.get("num_nextn_predict_layers", 2) is None:
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config(**changes).items() if v is not None}))
    with pytest.raises(CheckpointError, match=said):
        MtpCheckpoint.open(folder, TARGET)


def test_other_tensors_of_the_files_are_left_alone(tmp_path: Path) -> None:
    """As where modules lie in the files of their model."""
    folder = written(tmp_path, {**tensors(), "model.layers.0.self_attn.q_proj.weight": torch.zeros(3)})
    assert MtpCheckpoint.open(folder, TARGET).modules == ("model.layers.2.", "model.layers.3.")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    wrong = {**tensors(), "model.layers.2.eh_proj.weight": torch.full((HIDDEN, 2 * HIDDEN), torch.nan)}
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        drafting(written(tmp_path, wrong))


# -- front doors ----------------------------------------------------------------------------------------------


def llm_of(device: str, **changes: Any) -> LLM:
    options = EngineOptions(
        max_seqs=4, max_tokens=64, max_len=MAX_LEN, page_size=8, dtype=torch.float32, **changes
    )  # fmt: skip
    return LLM(RandomCheckpoint(TARGET), device=device, options=options)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_llm_with_modules(folder: Path, device: str) -> None:
    llm = llm_of(device, speculate="mtp", draft=folder)
    found = llm.generate(PROMPTS, GREEDY)
    assert [one.tokens for one in found] == [one.tokens for one in plain_llm().generate(PROMPTS, GREEDY)]
    assert "speculation: mtp drafts 3 tokens a round" in llm.explain()


def test_prompts_are_embedded_in_steps_with_rounds(folder: Path) -> None:
    llm = llm_of("cpu", speculate="mtp", draft=folder, embeddings=True)
    said, pooled = list[Seq](), list[Seq]()
    for number, (prompt, params) in enumerate(REQUESTS[:6]):
        said += llm.core.add(Request(f"said {number}", prompt, params))
        pooled += llm.core.add(Request(f"{number}", prompt, SamplingParams(max_tokens=0), pooling="mean"))
        llm.core.step()
    while not llm.core.is_idle:
        llm.core.step()
    check(said)
    wanted = llm_of("cpu", embeddings=True).embed(PROMPTS, normalize=False)
    for vector, sequence in zip(wanted, pooled, strict=True):
        assert sequence.embedding is not None
        torch.testing.assert_close(torch.from_numpy(sequence.embedding), torch.from_numpy(vector), atol=1e-4, rtol=1e-4)


def test_auto_takes_modules_too(folder: Path) -> None:
    chosen = choose_drafter(EngineOptions(speculate="auto", draft=folder), RandomCheckpoint(TARGET))
    assert str(chosen) == "mtp (auto: --draft names MTP modules)"


def test_modules_are_named() -> None:
    with pytest.raises(PlanError, match="Give --draft PATH"):
        EngineOptions(speculate="mtp")
