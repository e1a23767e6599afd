"""EAGLE-3 heads: what is drafted, what they keep beside the target, and which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from drafted import (
    GREEDY,
    PROMPTS,
    expect_caught_up,
    expect_drafts,
    expect_plain_output,
    expect_plain_output_of_a_scarce_cache,
    expect_plain_output_to_the_end_of_the_context,
    expect_steady_rounds,
)
from mixed_steps import DEPTH, ENGINE, PLACES, SCRIPTS, Moment, Played, among_prompts, looked_up
from phonograph import LLM, CheckpointError, EngineOptions, PlanError
from phonograph.engine import checkpoints
from phonograph.engine.cache.groups import CacheGroup, page_bytes
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.speculation import choose_drafter
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.rope import rope_table
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.ngram_eagle import ngram_eagle
from phonograph.engine.passes.registry import DRAFT, PASSES, kept_by
from phonograph.engine.passes.target_verify import speculating_passes
from speculation import MAX_LEN, Switching, plain_llm, speculating

pytestmark = pytest.mark.slow

TARGET = SHAPES["tiny"]
HIDDEN, DRAFTED = TARGET.hidden, 100


def tensors(num_taps: int = 2, *, has_head: bool = True, num_layers: int = 1) -> dict[str, torch.Tensor]:
    """Random ones, of heads that differ from the target's in number."""
    numbers = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers) * 2 / shape[-1] ** 0.5

    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    found = {
        "fc.weight": random(HIDDEN, num_taps * HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(96, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(48, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(48, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, 96),
        "midlayer.mlp.gate_proj.weight": random(80, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(80, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, 80),
        **{f"{name}.weight": 1 + random(HIDDEN) for name in norms},
        "d2t": torch.randperm(TARGET.vocab, generator=numbers)[:DRAFTED].sort().values - torch.arange(DRAFTED),
        "t2d": torch.zeros(TARGET.vocab, dtype=torch.bool),
    }
    for index in range(1, num_layers):
        own = [name for name in found if name.startswith("midlayer.") and "hidden_norm" not in name]
        shapes = {name.replace("midlayer", f"layers.{index}"): [*found[name].shape] for name in own}
        for name, shape in shapes.items():
            is_norm, reads_both = len(shape) == 1, "q_proj" in name or "k_proj" in name or "v_proj" in name
            found[name] = 1 + random(*shape) if is_norm else random(shape[0], HIDDEN if reads_both else shape[1])
    return {**found, "lm_head.weight": random(DRAFTED, HIDDEN)} if has_head else found


def config(**changes: Any) -> dict[str, Any]:
    usual = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": HIDDEN, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 16, "vocab_size": TARGET.vocab, "draft_vocab_size": DRAFTED, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 50_000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    }  # fmt: skip
    return {**usual, **changes}


def written(folder: Path, found: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A head as SpecForge writes it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    save_file(tensors() if found is None else found, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("head"))


def drafting(folder: Path, depth: int = 3, unread_places: int = 0) -> Drafting:
    model = drafted_for(plain_llm().executor.model)
    return eagle(DraftCheckpoint.open(folder, TARGET).load(model, MAX_LEN + 16), depth, unread_places)


# -- what is drafted ------------------------------------------------------------------------------------------


class ByHand:
    """The head over whole sequences, without pages."""

    def __init__(self, folder: Path, taps: Sequence[int], *, norms: bool) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.model = drafted_for(plain_llm().executor.model)
        self.taps, self.norms = tuple(taps), norms
        layer = DraftCheckpoint.open(folder, TARGET).config.layer
        self.layers = ["midlayer", *(f"layers.{index}" for index in range(1, layer.num_layers))]
        self.angles = rope_table(layer, 200, torch.device("cpu"))

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.weights[f"{name}.weight"], 1e-5)

    def projected(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}_proj.weight"].T

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        x, count = x.view(x.shape[0], -1, 16), x.shape[0]
        half = torch.cat([x[..., 8:], x[..., :8]], -1)
        return x * self.angles.cos[:count, None] + half * self.angles.sin[:count, None]

    def states(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output at every position; `tokens` come after the positions."""
        embedded = self.model.weights.embedding[torch.tensor(tokens)]
        x = torch.cat(
            [self.normed(embedded, "midlayer.input_layernorm"), self.normed(hidden, "midlayer.hidden_norm")], 1
        )
        for index, layer in enumerate(self.layers):
            if index:
                x = self.normed(hidden, f"{layer}.input_layernorm")
            q, k = (self.turned(self.projected(x, f"{layer}.self_attn.{name}")) for name in "qk")
            v = self.projected(x, f"{layer}.self_attn.v").view(len(tokens), -1, 16)
            k, v = (part.repeat_interleave(2, 1) for part in (k, v))
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = hidden + self.projected(mixed.transpose(0, 1).flatten(1), f"{layer}.self_attn.o")
            inner = self.normed(x, f"{layer}.post_attention_layernorm")
            gated = functional.silu(self.projected(inner, f"{layer}.mlp.gate")) * self.projected(
                inner, f"{layer}.mlp.up"
            )
            hidden = x + self.projected(gated, f"{layer}.mlp.down")
        return hidden

    def drafts(self, known: Sequence[int], depth: int) -> list[int]:
        computed, pages = len(known) - 1, torch.arange(1, 30)[None].repeat(2, 1)
        queries = Queries(torch.ones(computed).long(), torch.arange(computed), pages, tokens_per_row=None)
        cache = CacheGroup.empty(self.model.keeps, 40, 8, dtype=torch.float32, device=torch.device("cpu"))
        taps = self.model.hidden(torch.tensor(known[:-1]), queries, cache, taps=self.taps).taps
        if self.norms:
            taps = tuple(state / (state.square().mean(-1, keepdim=True) + 1e-5).sqrt() for state in taps)
        hidden, tokens = torch.cat(taps, 1) @ self.weights["fc.weight"].T, list(known[1:])
        head = self.weights.get("lm_head.weight")
        ids = torch.arange(DRAFTED) + self.weights["d2t"]
        head = self.model.weights.head.values()[ids] if head is None else head
        for _ in range(depth):
            last = self.states(tokens, hidden)[-1:]
            tokens.append(int(ids[(self.normed(last, "norm") @ head.T).argmax()]))
            hidden = torch.cat([hidden, last])
        return tokens[-depth:]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("kind", "layers"), [("published", 1), ("norms, target's head", 1), ("published", 3)])
def test_drafts_are_those_of_the_head_over_the_whole_sequence(
    tmp_path: Path, kind: str, layers: int, depth: int
) -> None:
    """Whatever was rejected, cut into chunks, or computed among others."""
    own = kind == "published"
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1] if own else [1, 0], "norms_features": not own}
    weights = tensors(has_head=own, num_layers=layers)
    folder = written(tmp_path, weights, eagle_config=taps, num_hidden_layers=layers)
    by_hand = ByHand(folder, [0, 1] if own else [1, 0], norms=not own)
    core = speculating(drafting(folder, depth), "disabled", max_ahead=0, prefix_cache=False, chunk=7)
    assert expect_drafts(core, depth, by_hand.drafts) > 60


def test_drafts_after_narrow_rounds_are_the_same(folder: Path) -> None:
    core = speculating(drafting(folder), "disabled", max_ahead=0, prefix_cache=False, chunk=7, narrows=True)
    core.scheduler.width = widths = Switching((2, 2, 4), every=1)
    assert expect_drafts(core, 3, ByHand(folder, [0, 1], norms=False).drafts, lambda: widths.calls % 3 == 2) > 10


@pytest.mark.parametrize("plain", [1, 4, 5, 9])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_catches_up_with_plain_steps(tmp_path: Path, layers: int, plain: int) -> None:
    """Fewer than it has places for, just as many, and more."""
    folder = written(tmp_path, tensors(num_layers=layers), num_hidden_layers=layers)
    usual: dict[str, Any] = {"max_ahead": 0, "prefix_cache": False, "chunk": 7, "unread_places": 4}
    core = speculating(drafting(folder, unread_places=4), "disabled", **usual)
    expect_caught_up(core, 3, plain, ByHand(folder, [0, 1], norms=False).drafts)


@among_prompts
def test_drafts_after_plain_steps_among_prompts_are_the_same(
    tmp_path: Path, moments: list[Moment], backend: str
) -> None:
    """Rows that decode leave their states there, and so do those whose prompts end."""
    folder = written(tmp_path, tensors(num_layers=2), num_hidden_layers=2)
    core = speculating(drafting(folder, unread_places=PLACES), backend, **ENGINE)
    assert Played(core, ByHand(folder, [0, 1], norms=False).drafts).play(moments).num_seen > 1


@pytest.mark.parametrize("moments", SCRIPTS.values(), ids=SCRIPTS)
def test_so_are_those_of_a_head_and_a_lookup(folder: Path, moments: list[Moment]) -> None:
    head = DraftCheckpoint.open(folder, TARGET).load(drafted_for(plain_llm().executor.model), MAX_LEN + 16)
    by_hand = ByHand(folder, [0, 1], norms=False)

    def drafts(known: Sequence[int], depth: int) -> list[int]:
        found = looked_up(known, depth)
        return found if found[0] >= 0 else by_hand.drafts(known, depth)

    core = speculating(ngram_eagle(head, DEPTH, PLACES), "disabled", **ENGINE)
    assert Played(core, drafts).play(moments).num_seen > 1


@pytest.mark.faults
@pytest.mark.parametrize("name", ["one", "several", "plain steps after the end"])
def test_what_a_pass_that_raised_did_not_read_is_read_later(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as there are places for it: rounds among prompts leave their tokens too, and so only drafts are lost."""
    core = speculating(drafting(folder, unread_places=PLACES), "disabled", **ENGINE)

    def run(batch: Any) -> object:
        raise RuntimeError("no memory for drafts")

    core.executor.runners[DRAFT.name].run = run  # type: ignore[method-assign, assignment]
    played = Played(core, ByHand(folder, [0, 1], norms=False).drafts, is_each_looked_at=False).play(SCRIPTS[name])
    assert played.num_seen > 1
    assert "draft failed, and its rows go on as they are: RuntimeError: no memory for drafts" in caplog.text


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled", "tc_piecewise"])
@pytest.mark.parametrize("layers", [1, 2])
def test_output_is_that_of_plain_decoding(tmp_path: Path, layers: int, backend: str) -> None:
    folder = written(tmp_path, tensors(num_layers=layers), num_hidden_layers=layers)
    expect_plain_output(drafting(folder), backend)


def test_a_scarce_cache(folder: Path) -> None:
    expect_plain_output_of_a_scarce_cache(drafting(folder))


def test_all_of_the_context_is_used(folder: Path) -> None:
    expect_plain_output_to_the_end_of_the_context(drafting(folder, 5))


def test_the_recordings_are_right_and_a_steady_round_is_one_launch(folder: Path) -> None:
    expect_steady_rounds(drafting(folder, 2))


def test_a_page_costs_what_the_head_keeps_too(folder: Path) -> None:
    model, made = plain_llm().executor.model, drafting(folder)
    plain, both = (page_bytes(kept_by(model, one), 8, model.dtype) for one in (PASSES, speculating_passes(made)))
    assert both - plain == 8 * 2 * 3 * 16 * 4


# -- which are refused ----------------------------------------------------------------------------------------


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("changes", "found", "said"),
    [
        ({"architectures": ["LlamaModel"]}, None, "the architecture is LlamaModel"),
        ({"hidden_size": 32}, None, "its hidden size is 32, and the model's is 64"),
        ({"vocab_size": 300}, None, "its vocabulary is 300, and the model's is 256"),
        ({"draft_vocab_size": 300}, None, "its draft vocabulary is 300"),
        ({"num_hidden_layers": 2}, None, r"layers\.1\.self_attn\.q_proj\.weight is missing"),
        ({"num_hidden_layers": 17}, None, "it has 17 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, None, r"it taps the layers \[0, 2\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, None, r"it taps the layers \[1, 1\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "as in EAGLE-1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, None, "fc.weight has shape"),
        ({"attention_bias": True}, None, "biases"),
        ({"hidden_act": "gelu"}, None, "'gelu'; supported is silu in the layers of a draft head. Give --draft another"),
        ({}, without("norm.weight"), "norm.weight is missing"),
        ({}, without("d2t"), "d2t is missing"),
        ({}, {**tensors(), "midlayer.extra": torch.zeros(1)}, "midlayer.extra is no part"),
        ({}, {**tensors(), "fc.weight": torch.zeros(HIDDEN, HIDDEN)}, "fc.weight has shape"),
        ({}, {**tensors(), "d2t": torch.zeros(DRAFTED)}, "d2t is stored as F32"),
        (
            {},
            {**tensors(), "d2t": torch.full((DRAFTED,), 250)},
            f"d2t names the token {DRAFTED + 249}, of a vocabulary",
        ),
        ({}, {**tensors(), "d2t": torch.full((DRAFTED,), -7)}, "d2t names the token -7, of a vocabulary of 256"),
        ({}, {**tensors(), "d2t": torch.full((DRAFTED,), 2**63 - 1)}, "d2t names the token -9223372036854775808"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], found: dict[str, torch.Tensor] | None, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        DraftCheckpoint.open(written(tmp_path, found, **changes), TARGET)


def test_weights_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    wrong = {**tensors(), "fc.weight": torch.full((HIDDEN, 2 * HIDDEN), torch.nan)}
    with pytest.raises(CheckpointError, match=r"can't draft for this model: .*NaN or infinite"):
        drafting(written(tmp_path, wrong))


def test_files_that_are_not_there_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        DraftCheckpoint.open(tmp_path, TARGET)
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such folder\. Give"):
        DraftCheckpoint.open(tmp_path / "nowhere", TARGET)
    folder = written(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: it is a file\. Give a folder"):
        DraftCheckpoint.open(folder / "config.json", TARGET)
    (folder / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        DraftCheckpoint.open(folder, TARGET)


def test_a_head_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LLM, "_model", read)
    options = EngineOptions(speculate="eagle", draft=written(tmp_path, hidden_size=32))
    with pytest.raises(CheckpointError, match="hidden size"):
        LLM(RandomCheckpoint(TARGET), device="cpu", options=options)


def test_a_head_and_its_flag_come_together(folder: Path) -> None:
    for options in ({"draft": folder}, {"speculate": "ngram", "draft": folder}):
        with pytest.raises(PlanError, match="or neither"):
            EngineOptions(**options)
    with pytest.raises(PlanError, match=r"rule 'speculation-needs-a-head' .* none comes with this model"):
        LLM(RandomCheckpoint(TARGET), device="cpu", options=EngineOptions(speculate="eagle"))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_llm_with_a_head(folder: Path, device: str) -> None:
    options = EngineOptions(
        max_seqs=4, max_tokens=64, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate="eagle", draft=folder
    )
    llm = LLM(RandomCheckpoint(TARGET), device=device, options=options)
    found = llm.generate(PROMPTS, GREEDY)
    assert [one.tokens for one in found] == [one.tokens for one in plain_llm().generate(PROMPTS, GREEDY)]
    assert llm.drafting is not None
    assert llm.drafting.name == "eagle"


# -- who is chosen --------------------------------------------------------------------------------------------


def test_auto_takes_what_there_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, shipped = RandomCheckpoint(TARGET), tmp_path / "shipped"
    auto = EngineOptions(speculate="auto")
    chosen = choose_drafter(auto, checkpoint)
    assert str(chosen) == "ngram (auto: no head comes with this model, and --draft names none)"
    assert str(choose_drafter(replace(auto, draft=folder), checkpoint)) == "eagle (auto: --draft names a head)"
    # The default model, and the head that comes with it.
    default = tmp_path / "default.gguf"
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: True)
    monkeypatch.setattr(checkpoints, "default_model", lambda: default)
    checkpoint = replace(checkpoint, source=str(default))
    monkeypatch.setattr(checkpoints, "_HEAD", shipped)
    shutil.copytree(folder, shipped)
    assert str(choose_drafter(auto, checkpoint)) == "eagle (auto: a head comes with this model)"
    assert str(choose_drafter(EngineOptions(speculate="eagle"), checkpoint)) == "eagle"
    assert str(choose_drafter(EngineOptions(speculate="ngram"), checkpoint)) == "ngram"
    (shipped / "config.json").write_text(json.dumps(config(hidden_size=32)))
    with pytest.raises(CheckpointError, match="hidden size"):
        choose_drafter(auto, checkpoint)


def test_auto_tells_what_it_took(folder: Path) -> None:
    options = EngineOptions(
        max_seqs=2, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate="auto", draft=folder
    )
    llm = LLM(RandomCheckpoint(TARGET), device="cpu", options=options)
    assert "speculation: eagle (auto: --draft names a head) drafts 3 tokens a round" in llm.explain()
