"""The adapter's parts: outlines without weights, the model's own head, the self-check, experts, and what is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers

from adapted import ALSO_SERVED, PLAIN_SIZES, SERVED, VOCAB, Family, greedy, made, saved
from phonograph import LLM
from phonograph.devices import open_device
from phonograph.engine.cache.groups import CacheGroup, Paged, PagedCache
from phonograph.engine.checkpoints import open_checkpoint, random_checkpoint
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.execution.sizing import plan_for
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import PLAIN, Queries, Scores, StepAttention
from phonograph.engine.options import EngineOptions, ModelImplementation
from phonograph.engine.precision import precision_for
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError, DeclarationError, PlanError
from phonograph.hf.adapter import attention
from phonograph.hf.adapter.experts import implementation, reading_module
from phonograph.hf.adapter.head import head_of, logits_of
from phonograph.hf.adapter.model import HfModel
from phonograph.hf.adapter.outline import outline_of
from phonograph.hf.adapter.self_check import narrowed, self_check

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
NOBODY = Queries(torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1, 1).int(), 1)
IMPLEMENTATIONS: list[ModelImplementation] = ["native", "hf"]
PROMPTS = [[5, 9, 11], [7, 3, 60, 61, 62, 63, 64, 65, 66]]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> HfModel:
    parts = ModelParts(ReferenceAttention(), ReferenceKernels(), 40)
    model = load_model(open_checkpoint(folder, "hf"), parts, dtype, CPU)
    assert isinstance(model, HfModel)
    return model


class TestOutline:
    @pytest.mark.parametrize("name", SERVED)
    def test_every_layer_is_found_without_weights(self, name: str) -> None:
        outline = outline_of(SERVED[name].config(), name)
        assert len(outline.layers) == 2
        assert (outline.vocab, outline.breaks) == (VOCAB, ())
        assert bool(outline.windows) == ("window" in SERVED[name].has)
        assert any(layer.has_sinks for layer in outline.layers) == ("sinks" in SERVED[name].has)

    def test_pages_are_as_wide_as_the_wider_of_keys_and_values(self) -> None:
        outline = outline_of(SERVED["DeepSeek-V3"].config(), "deepseek")
        assert [(layer.key_dim, layer.value_dim, layer.kept) for layer in outline.layers] == [(12, 6, Paged(4, 12))] * 2
        assert "keys and values of different widths" in outline.described()

    def test_experts_that_the_host_routes_are_named(self) -> None:
        outline = outline_of(ALSO_SERVED["DBRX"].config(), "dbrx")
        assert outline.breaks == ("transformer.blocks.0.ffn.experts", "transformer.blocks.1.ffn.experts")

    def test_other_errors_are_no_experts(self) -> None:
        model = made(ALSO_SERVED["DBRX"])
        for error in (ValueError("meta"), RuntimeError("shapes differ"), NotImplementedError("nonzero")):
            assert reading_module(model, error) is None  # raised outside of every module

    def test_phases_of_such_a_model_have_gaps_by_default(self) -> None:
        plan = plan_for(open_device("emulated"), (), on_cpu_by_default=False, breaks=("experts",))
        assert {plan.phase(name).backend for name in ("decode", "prefill", "idle")} == {"breakable"}
        assert "experts reads the device from the host" in plan.explain()

    def test_the_layers_may_be_named(self) -> None:
        config = SERVED["GPT-2"].config()
        assert outline_of(config, "gpt2", decoder="transformer").decoder == "transformer"
        with pytest.raises(CheckpointError, match=r"no module 'transformers'; the nearest name is 'transformer'"):
            outline_of(config, "gpt2", decoder="transformers")

    @pytest.mark.parametrize(
        ("kind", "values", "problem"),
        [
            ("bert", {}, "BertSelfAttention looks at tokens after its own"),
            ("bart", {"encoder_layers": 2}, "in 12 layers, and the 2 of its configuration are the encoder's"),
            ("bart", {"decoder_layers": 2}, "in 2 layers, and the 12 of its configuration are the encoder's"),
            ("diffllama", {"num_hidden_layers": 2}, "a layer of DiffLlamaForCausalLM attends 2 times"),
            ("musicgen", {}, "several models of text"),
        ],
    )
    def test_other_ways_to_attend_are_refused(self, kind: str, values: dict[str, int], problem: str) -> None:
        with pytest.raises(CheckpointError, match=problem):
            outline_of(transformers.AutoConfig.for_model(kind, **values), kind)

    def test_an_encoder_is_refused(self) -> None:
        config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCAB)
        with pytest.raises(CheckpointError, match="can't be made as a causal language model"):
            outline_of(config, "t5")


@pytest.mark.parametrize(
    ("dtype", "device", "found"),
    [
        (torch.bfloat16, "cuda", "grouped_mm"),
        (torch.float16, "cuda", "batched_mm"),
        (torch.bfloat16, "cpu", "batched_mm"),
    ],
)
def test_how_experts_are_routed(dtype: torch.dtype, device: str, found: str) -> None:
    assert implementation(dtype, torch.device(device)) == found


@pytest.mark.parametrize("name", ["Gemma 2", "Granite", "Cohere 2", "GPT-2", "gpt-oss", "Llama"])
def test_the_head_gives_the_bits_of_the_whole_model(name: str) -> None:
    model = made(SERVED[name])
    path = outline_of(model.config, name).decoder
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        states = model.get_submodule(path)(input_ids=ids, use_cache=False)[0][0]
        wanted = model(input_ids=ids, use_cache=False).logits[0]
        assert torch.equal(logits_of(head_of(model, path), states), wanted)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits[0], wanted)  # it has its layers still


@dataclass(frozen=True)
class Wrong:
    """Attention that leaves something out."""

    without: str
    name = "wrong"

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        is_decode = queries.tokens_per_row == 1
        return _WrongStep(ReferenceAttention().prepare(cache, queries, num_heads), self.without, is_decode)


@dataclass(frozen=True)
class _WrongStep:
    inner: StepAttention
    without: str
    is_decode: bool

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        window = None if self.without == "window" else window
        window = 1 if self.without == "history" and self.is_decode else window
        scores = PLAIN if self.without == "scores" else scores
        mixed = self.inner.attend(layer, q, window, out, scores)
        return mixed * float("nan") if self.without == "finite" else mixed


def test_a_wrappers_text_model_may_have_the_end_tokens(tmp_path: Path) -> None:
    folder = saved(made(ALSO_SERVED["Gemma 3, with images"]), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("eos_token_id", None)
    config["text_config"]["eos_token_id"] = [7, 9, 10**6]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder, "hf").config.eos_ids == (7, 9)


class TestSelfCheck:
    @pytest.mark.parametrize(("name", "without"), [
        ("Mistral", "window"), ("Gemma 2", "scores"), ("gpt-oss", "scores"), ("GPT-2", "finite"),
    ])  # fmt: skip
    def test_attention_that_leaves_something_out_is_refused(self, tmp_path: Path, name: str, without: str) -> None:
        model = loaded(saved(made(SERVED[name]), tmp_path))
        assert "checked against the model's own eager attention: " in model.notes[0]
        with pytest.raises(CheckpointError, match="other logits than with the model's own eager attention"):
            self_check(replace(model, attention=Wrong(without)), name)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_decode_steps_that_are_all_wrong_are_refused_where_tokens_are_routed(
        self, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        """Rounding may send some tokens to other experts: some of the prompts', and some of those decoded."""
        model = loaded(saved(made(SERVED["Mixtral"]), tmp_path), dtype)
        with pytest.raises(CheckpointError, match="other logits"):
            self_check(replace(model, attention=Wrong("history")), "mixtral")

    @pytest.mark.parametrize("architecture", ["Llama", "Qwen2Moe"])
    def test_windows_that_attention_is_not_told_of_are_refused(self, tmp_path: Path, architecture: str) -> None:
        """Transformers' cache cuts at the window of any config, and some models put it into their mask alone."""
        shape = SERVED["Qwen3-MoE"].config().to_dict()
        windows = {"sliding_window": 25, "use_sliding_window": True, "max_window_layers": 2, "layer_types": None}
        sizes = {name: shape[name] for name in shape if "num_" in name or "_size" in name} | windows
        config = getattr(transformers, f"{architecture}Config")(**sizes)
        folder = saved(made(replace(SERVED["Llama"], config=lambda: config)), tmp_path)
        with pytest.raises(CheckpointError, match="other logits"):
            loaded(folder)

    def test_wide_windows_are_crossed_too(self, tmp_path: Path) -> None:
        config = transformers.MistralConfig(**{**SERVED["Mistral"].config().to_dict(), "sliding_window": 100})
        torch.manual_seed(0)
        model = loaded(saved(made(replace(SERVED["Mistral"], config=lambda: config)), tmp_path))
        with pytest.raises(CheckpointError):
            self_check(replace(model, attention=Wrong("window")), "mistral")
        assert model.whole.config.sliding_window == 100

    def test_windows_are_as_they_were_after_an_error(self) -> None:
        model = made(SERVED["Gemma 3"])
        found = [getattr(one, "sliding_window", None) for one in model.modules()]

        def fail() -> None:
            with narrowed(model, 3):
                assert model.config.sliding_window == 3
                raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            fail()
        assert [getattr(one, "sliding_window", None) for one in model.modules()] == found
        assert model.config.sliding_window == 6

    def test_a_model_that_adds_to_scores_by_itself_is_refused(self, tmp_path: Path, monkeypatch: Any) -> None:
        """As one with a bias by distance would: every layer calls attention, and no count shows it."""
        from transformers.models.llama import modeling_llama

        eager = modeling_llama.eager_attention_forward

        def biased(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
            at = torch.arange(q.shape[2], dtype=q.dtype)
            return eager(module, q, k, v, mask - (at[:, None] - at), **kwargs)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
        with pytest.raises(CheckpointError, match="Its attention, or its positions, are of a kind"):
            loaded(saved(made(SERVED["Llama"]), tmp_path))

    def test_positions_of_its_own_are_refused(self, tmp_path: Path) -> None:
        """RoBERTa counts positions from its padding token on."""
        family = Family(lambda: transformers.RobertaConfig(**PLAIN_SIZES, is_decoder=True))
        with pytest.raises(CheckpointError, match="or its positions, are of a kind"):
            loaded(saved(made(family), tmp_path))


class TestModel:
    @pytest.mark.parametrize("asked", ["output_router_logits", "output_hidden_states", "output_attentions"])
    def test_what_a_configuration_asks_to_return_besides_is_left_out(self, tmp_path: Path, asked: str) -> None:
        model = made(SERVED["Mixtral"])
        folder = saved(model, tmp_path)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {asked: True}))
        llm = LLM(folder, device="cpu", options=EngineOptions(max_seqs=2, max_tokens=16, max_len=40, model_impl="hf"))
        assert [one.tokens for one in llm.generate(PROMPTS, GREEDY)] == [greedy(model, one, 6) for one in PROMPTS]

    def test_taps_are_refused(self, tmp_path: Path) -> None:
        model = loaded(saved(made(SERVED["GPT-2"]), tmp_path))
        with pytest.raises(DeclarationError, match="no hidden states of single layers"):
            model.hidden(torch.zeros(1), NOBODY, CacheGroup(()), taps=(0,))

    def test_its_attention_needs_a_step(self, tmp_path: Path) -> None:
        model = loaded(saved(made(SERVED["GPT-2"]), tmp_path))
        with pytest.raises(DeclarationError, match="no step of an engine runs"):
            model.whole(input_ids=torch.tensor([[3]]))
        assert model.whole.config._attn_implementation == attention.NAME

    def test_random_weights_are_those_of_the_native_model(self) -> None:
        options = EngineOptions(max_seqs=2, max_tokens=16, max_len=40, page_size=4)
        found = [
            LLM(random_checkpoint("tiny", impl), device="cpu", options=options).generate(PROMPTS, GREEDY)
            for impl in IMPLEMENTATIONS
        ]
        assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]

    def test_shapes_of_models_that_are_not_ours(self) -> None:
        checkpoint = random_checkpoint("tiny-moe")
        assert checkpoint.config.architecture == "MixtralForCausalLM"
        llm = LLM(checkpoint, device="cpu", options=EngineOptions(max_seqs=2, max_tokens=16, max_len=40))
        assert "experts by batched_mm" in llm.implementation
        assert [len(one.tokens) for one in llm.generate(PROMPTS, GREEDY)] == [6, 6]
        for impl in IMPLEMENTATIONS:
            with pytest.raises(PlanError, match="shape 'tinier' is unknown"):
                random_checkpoint("tinier", impl)

    def test_the_same_seed_makes_the_same_model_whatever_was_drawn_before(self) -> None:
        def weights(seed: int, drawn: int) -> torch.Tensor:
            torch.manual_seed(drawn)
            following = torch.rand(1)
            torch.manual_seed(drawn)
            checkpoint = replace(random_checkpoint("tiny-moe"), seed=seed)
            model = load_model(checkpoint, ModelParts(ReferenceAttention(), ReferenceKernels(), 40), torch.float32, CPU)
            assert isinstance(model, HfModel)
            assert torch.equal(torch.rand(1), following), "no draw of the caller's depends on it"
            return torch.cat([one.flatten() for one in model.whole.parameters()])

        assert torch.equal(weights(0, drawn=1), weights(0, drawn=2))
        assert not torch.equal(weights(0, drawn=1), weights(1, drawn=1))

    def test_the_residual_stream_is_as_the_weights_are(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(saved(made(SERVED["GPT-2"]), tmp_path))
        half = EngineOptions(dtype=torch.float16)
        assert precision_for(checkpoint, half, CPU).residual == torch.float16
        with pytest.raises(PlanError, match="layers of transformers keep the residual stream"):
            precision_for(checkpoint, replace(half, residual_dtype=torch.float32), CPU)


def test_the_engine_in_a_process_of_its_own_says_whose_layers_it_has(tmp_path: Path) -> None:
    folder = saved(made(SERVED["GPT-2"]), tmp_path)
    arguments = EngineArguments(
        model=str(folder), device="cpu", options=EngineOptions(max_seqs=2, max_tokens=16, max_len=40)
    )
    with asyncio.Runner() as runner:
        llm = AsyncLLM(arguments)
        runner.run(asyncio.wait_for(llm.start(), 120))
        try:
            assert llm.about.implementation.startswith("hf: GPT2LMHeadModel of transformers ")
            assert llm.about.vocab == VOCAB
        finally:
            runner.run(llm.stop())


CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path(__file__).with_name("was_run").touch()
class OwnConfig(GPT2Config):
    model_type = "own"
class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


class TestFolders:
    def own(self, tmp_path: Path) -> tuple[Path, Any]:
        """A folder that brings its model's code; that leaves a mark where it is run."""
        model = made(SERVED["GPT-2"])
        folder = saved(model, tmp_path / "own")
        values = json.loads((folder / "config.json").read_text())
        values |= {"model_type": "own", "architectures": ["OwnModel"]}
        values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "own.py").write_text(
            CODE.replace('Path(__file__).with_name("was_run")', f"Path({str(tmp_path / 'was_run')!r})")
        )
        return folder, model

    def test_code_of_a_folder_is_not_run_unasked(self, tmp_path: Path) -> None:
        folder, _ = self.own(tmp_path)
        for impl in ("auto", "hf"):
            with pytest.raises(CheckpointError, match=r"code is not run unasked.*--trust-remote-code"):
                LLM(folder, device="cpu", options=EngineOptions(model_impl=impl))
        assert not (tmp_path / "was_run").exists()

    def test_code_of_a_folder_runs_when_it_is_trusted(self, tmp_path: Path, monkeypatch: Any) -> None:
        folder, model = self.own(tmp_path)
        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        options = EngineOptions(trust_remote_code=True, max_seqs=2, max_tokens=16, max_len=40)
        llm = LLM(folder, device="cpu", options=options)
        assert (tmp_path / "was_run").exists()
        assert [one.tokens for one in llm.generate(PROMPTS, GREEDY)] == [greedy(model, one, 6) for one in PROMPTS]

    def test_code_of_a_folder_that_transformers_knows_better_is_not_run(self, tmp_path: Path) -> None:
        folder, _ = self.own(tmp_path)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "model_type": "gpt2"}))
        LLM(folder, device="cpu", options=EngineOptions(max_seqs=2, max_len=40))
        assert not (tmp_path / "was_run").exists()

    def test_pickled_weights_are_refused(self, tmp_path: Path) -> None:
        folder = saved(made(SERVED["GPT-2"]), tmp_path)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"found pytorch_model.bin.*save_pretrained"):
            open_checkpoint(folder)

    def test_unknown_and_quantised_models_are_refused(self, tmp_path: Path) -> None:
        folder = saved(made(SERVED["GPT-2"]), tmp_path)
        values = json.loads((folder / "config.json").read_text())
        for changes, problem in (
            ({"model_type": "newer"}, "transformers does not know the model_type 'newer'"),
            ({"quantization_config": {"quant_method": "mxfp4"}}, "its weights are stored as mxfp4"),
        ):
            (folder / "config.json").write_text(json.dumps({**values, **changes}))
            with pytest.raises(CheckpointError, match=problem):
                open_checkpoint(folder)

    def test_a_configuration_that_names_two_models_is_refused(self, tmp_path: Path) -> None:
        folder = saved(made(SERVED["GPT-2"]), tmp_path)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "architectures": ["OPTForCausalLM"]}))
        with pytest.raises(CheckpointError, match="says OPTForCausalLM, but model_type makes a GPT2LMHeadModel"):
            LLM(folder, device="cpu")

    def test_gguf_files_have_no_layers_of_transformers(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").touch()
        with pytest.raises(CheckpointError, match="transformers takes folders"):
            open_checkpoint(tmp_path / "model.gguf", "hf")

    def test_without_transformers_the_extra_is_named(self, tmp_path: Path, monkeypatch: Any) -> None:
        folder = saved(made(SERVED["GPT-2"]), tmp_path)
        monkeypatch.setattr("phonograph.hf.adapter.checkpoint.find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"pip install 'phonograph\[hf\]'"):
            open_checkpoint(folder)

    def test_explain_says_which_without_weights(self, tmp_path: Path, capsys: Any) -> None:
        from phonograph.cli.main import main

        folder = saved(made(SERVED["Gemma 2"]), tmp_path)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        assert main(["explain", "--model", str(folder), "--device", "cpu"]) == 0
        assert "model: hf: Gemma2ForCausalLM of transformers" in capsys.readouterr().out
