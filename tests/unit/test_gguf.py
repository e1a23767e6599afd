"""GGUF files: written by the gguf package, read back equal, and refused by name before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.checkpoints import GgufCheckpoint, RandomCheckpoint, TensorInfo, open_checkpoint
from phonograph.engine.checkpoints.generation_config import from_gguf
from phonograph.engine.checkpoints.gguf_header import TYPES, GgufHeader
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.models.registry import config_from_gguf
from phonograph.engine.models.rope_scaling import FactorsRope, LinearRope, YarnRope
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import Queries
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError

gguf = pytest.importorskip("gguf")

TINY = replace(
    SHAPES["tiny"], num_layers=2, hidden=32, intermediate=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab=64
)
QUANTISED = [kind.name for kind in TYPES.values() if kind.block > 1]


def refused(path: Path, *parts: str) -> None:
    """Opening fails, with an error that says all of this."""
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint.open(path)
    for part in parts:
        assert part in str(caught.value)


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order of rows that llama.cpp's converter gives to the queries and keys of a `llama`."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inside = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
    module, end = name.rsplit(".", 1)
    if module in outside:
        return f"{outside[module]}.{end}"
    layer, part = module.split(".")[2], module.split(".")[-1]
    if part in ("gate_proj", "up_proj", "down_proj"):
        return f"blk.{layer}.ffn_{part.removesuffix('_proj')}.{end}"
    return f"blk.{layer}.{inside.get(part, 'attn_' + part.removesuffix('_proj'))}.{end}"


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, Any],
    arch: str = "llama",
    change: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """A GGUF file of numpy arrays under GGUF's names, or of (array, type) pairs; `change` may add metadata."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_key_length(config.head_dim)
    writer.add_vocab_size(config.vocab)
    change(writer)
    for name, value in tensors.items():
        array, raw_dtype = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def arrays(config: ModelConfig = TINY) -> dict[str, Any]:
    """Random weights as a GGUF file would have them, without the order of rows."""
    return {gguf_name(name): tensor.numpy() for name, tensor in RandomCheckpoint(config).tensors()}


class TestGguf:
    @pytest.mark.parametrize(
        ("arch", "config"),
        [
            ("llama", TINY),
            ("llama", replace(TINY, tied_embeddings=True, head_dim=16)),
            ("llama", replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True)),
            ("qwen2", replace(TINY, architecture="Qwen2ForCausalLM", qkv_bias=True, tied_embeddings=True)),
            ("qwen3", replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=16)),
        ],
    )
    def test_every_architecture_comes_back(self, tmp_path: Path, arch: str, config: ModelConfig) -> None:
        original = dict(RandomCheckpoint(config).tensors())
        stored = dict(original)
        if arch == "llama":
            for name, tensor in original.items():
                if ".q_proj." in name or ".k_proj." in name:
                    num_heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
                    stored[name] = permuted(tensor, num_heads)
        path = write_gguf(
            tmp_path / "m.gguf", config, {gguf_name(name): tensor.numpy() for name, tensor in stored.items()}, arch
        )
        checkpoint = open_checkpoint(path)
        expected = replace(config, bos_id=None, eos_ids=(), rms_eps=checkpoint.config.rms_eps, dtype=torch.bfloat16)
        assert checkpoint.config == expected
        ours = dict(checkpoint.tensors())
        assert ours.keys() == original.keys()
        assert all(torch.equal(ours[name], original[name]) for name in original)

    @pytest.mark.parametrize("tied", [False, True])
    def test_logits_with_biases_in_all_projections_are_those_of_transformers(self, tmp_path: Path, tied: bool) -> None:
        pytest.importorskip("transformers")
        from reference import reference_model

        config = replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=tied)
        stored = {name: tensor.float() * 8 for name, tensor in RandomCheckpoint(config).tensors()}
        path = write_gguf(tmp_path / "m.gguf", config, {gguf_name(name): t.numpy() for name, t in stored.items()})
        checkpoint = open_checkpoint(path)
        parts = ModelParts(ReferenceAttention(), ReferenceKernels(), 16)
        model = load_model(checkpoint, parts, torch.float32, torch.device("cpu"))
        assert {matrix.stored for matrix in model.matrices} == {("F32",)}
        assert [matrix.bias is None for matrix in model.matrices] == [False] * 8 + [True]
        tokens, positions = torch.arange(9) * 7 % config.vocab, torch.arange(9)
        cache = CacheGroup.empty(model.keeps, 4, 4, dtype=torch.float32, device=torch.device("cpu"))
        table = torch.tensor([[0, 0, 0], [1, 2, 3]], dtype=torch.int32)
        queries = Queries(torch.ones_like(positions), positions, table, tokens_per_row=None)
        found = model.logits(model.hidden(tokens, queries, cache).states)
        with torch.inference_mode():
            wanted = reference_model(checkpoint)(tokens[None]).logits[0]
        assert wanted.std() > 0.1
        assert (found - wanted).abs().max().item() <= 1e-3

    @pytest.mark.parametrize("name", ["F16", "BF16"])
    def test_halves_stay_halves(self, tmp_path: Path, name: str) -> None:
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[name]
        weight = torch.randn(64, 32).to(dtype)
        raw = weight.view(torch.int16).numpy().view(np.float16 if name == "F16" else np.uint8)
        kind = None if name == "F16" else gguf.GGMLQuantizationType.BF16
        path = write_gguf(tmp_path / "m.gguf", TINY, {**arrays(), "output.weight": (raw, kind)})
        checkpoint = open_checkpoint(path)
        assert checkpoint.names["lm_head.weight"].dtype == dtype
        assert torch.equal(dict(checkpoint.tensors())["lm_head.weight"], weight)

    @pytest.mark.parametrize("name", QUANTISED)
    def test_quantised_blocks_are_unpacked(self, tmp_path: Path, name: str) -> None:
        kind = gguf.GGMLQuantizationType[name]
        assert (TYPES[kind.value].block, TYPES[kind.value].block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        config = replace(TINY, hidden=256, num_heads=4, num_kv_heads=2, head_dim=64)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(0).integers(0, 60, (config.vocab, 256 // block * block_bytes), dtype=np.uint8)
        path = write_gguf(tmp_path / "m.gguf", config, {**arrays(config), "output.weight": (raw, kind)})
        checkpoint = open_checkpoint(path)
        info = checkpoint.names["lm_head.weight"]
        assert info == TensorInfo((64, 256), torch.float32, name, raw.size)
        tensor = dict(checkpoint.tensors())["lm_head.weight"]
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, torch.from_numpy(gguf.dequantize(raw, kind)))

    def test_the_header_is_what_the_gguf_package_reads(self, tmp_path: Path) -> None:
        def change(writer: Any) -> None:
            writer.add_token_list(["a", "é", ""])
            writer.add_token_types([1, 3, 4])
            writer.add_array("floats", [0.5, 1.5])
            for name, kind in [("i8", "int8"), ("u16", "uint16"), ("i64", "int64"), ("f64", "float64"), ("b", "bool")]:
                getattr(writer, f"add_{kind}")(name, 1)

        path = write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=change)
        reader, header = gguf.GGUFReader(path), GgufHeader.read(path)
        theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert header.metadata == theirs
        places = {t.name: (tuple(t.shape[::-1]), t.data_offset, t.n_bytes) for t in reader.tensors}
        assert {name: (t.shape, t.start, t.num_bytes) for name, t in header.tensors.items()} == places

    def test_stretched_frequencies_in_a_tensor(self, tmp_path: Path) -> None:
        factors = np.array([1.0, 1.5, 4.0, 8.0], dtype=np.float32)
        checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", TINY, {**arrays(), "rope_freqs.weight": factors}))
        assert checkpoint.config.rope_scaling == FactorsRope((1.0, 1.5, 4.0, 8.0))
        plain = replace(checkpoint.config, rope_scaling=None).inv_freq()
        assert torch.equal(checkpoint.config.inv_freq(), plain / torch.from_numpy(factors))

    @pytest.mark.parametrize("kind", ["linear", "yarn"])
    def test_stretched_frequencies_in_the_metadata(self, tmp_path: Path, kind: str) -> None:
        def change(writer: Any) -> None:
            writer.add_string("llama.rope.scaling.type", kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        config = open_checkpoint(write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=change)).config
        expected = {"linear": LinearRope(4.0), "yarn": YarnRope(4.0, 128, attention_factor=0.1 * math.log(4) + 1)}
        assert config.rope_scaling == expected[kind]

    def test_the_ends_of_an_answer(self, tmp_path: Path) -> None:
        def change(writer: Any) -> None:
            writer.add_bos_token_id(5)
            writer.add_eos_token_id(6)
            writer.add_eot_token_id(7)

        config = open_checkpoint(write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=change)).config
        assert (config.bos_id, config.eos_ids) == (5, (6, 7))


class TestRefusedGguf:
    @pytest.mark.parametrize("num_bytes", [0, 1, 4, 8, 30, 200, 500, 2000, -1, -5000])
    def test_a_file_that_is_cut_short(self, tmp_path: Path, num_bytes: int) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, arrays())
        path.write_bytes(path.read_bytes()[:num_bytes])
        refused(path, "m.gguf", "et it again")

    def test_a_file_that_goes_on_after_its_tensors(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, {"rope_freqs.weight": np.zeros(3, dtype=np.float32)})
        full = path.read_bytes()
        (tensor,) = GgufHeader.read(path).tensors.values()
        end = tensor.start + tensor.num_bytes
        assert end % 32 == 12
        for padding in (0, 1, 20):
            path.write_bytes(full[:end] + bytes(padding))
            GgufHeader.read(path)
        path.write_bytes(full[:end] + bytes(21))
        refused(path, f"the tensors end at byte {end}, but the file goes on to {end + 21}", "et it again")

    def test_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGML" + bytes(100))
        refused(tmp_path / "m.gguf", "it starts with b'GGML'")
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
        refused(tmp_path / "m.gguf", "version 1", "(2, 3)")

    def test_an_architecture(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, arrays(), arch="gemma2")
        refused(path, "general.architecture is 'gemma2'", "llama, qwen2, qwen3")

    def test_a_quantisation(self, tmp_path: Path) -> None:
        raw = np.zeros((64, 66), dtype=np.uint8)
        config = replace(TINY, hidden=256, head_dim=64)
        tensors = {**arrays(config), "output.weight": (raw, gguf.GGMLQuantizationType.IQ2_XXS)}
        refused(write_gguf(tmp_path / "m.gguf", config, tensors), "tensor output.weight", "number 16", "Q4_K")

    def test_missing_extra_and_misshapen_tensors(self, tmp_path: Path) -> None:
        tensors = arrays()
        tensors["blk.0.ffn_up_exps.weight"] = tensors.pop("blk.0.ffn_up.weight")
        tensors["blk.1.attn_k.weight"] = np.zeros((8, 32), dtype=np.float32)
        refused(
            write_gguf(tmp_path / "m.gguf", TINY, tensors),
            "missing model.layers.0.mlp.up_proj.weight",
            "blk.0.ffn_up_exps.weight",
            "model.layers.1.self_attn.k_proj.weight has shape [8, 32]",
        )

    def test_an_offset_inside_another_tensor(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, arrays())
        data = bytearray(path.read_bytes())
        # name, number of dims, two dims, type, offset
        place = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16 + 4
        data[place : place + 8] = (32).to_bytes(8, "little")
        path.write_bytes(data)
        refused(path, "starts at byte", "inside token_embd.weight")

    @pytest.mark.parametrize(
        ("key", "value", "parts"),
        [
            ("llama.rope.dimension_count", 4, ["rope.dimension_count is 4 of 8"]),
            ("llama.attention.value_length", 16, ["attention.value_length is 16"]),
            ("llama.expert_count", 8, ["expert_count is 8"]),
            ("llama.attention.sliding_window", 16, ["attention.sliding_window is 16"]),
            ("llama.rope.scaling.attn_factor", 1, ["attn_factor is not supported"]),
        ],
    )
    def test_a_feature(self, tmp_path: Path, key: str, value: int, parts: list[str]) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=lambda writer: writer.add_uint32(key, value))
        refused(path, "m.gguf", *parts)

    def test_heads_that_differ_by_layer(self) -> None:
        metadata = {"general.architecture": "llama", "llama.embedding_length": 32, "llama.attention.head_count": [4, 2]}
        with pytest.raises(CheckpointError, match=r"attention.head_count is \[4, 2\]; expected an integer"):
            config_from_gguf(metadata, ())

    def test_a_vocabulary(self, tmp_path: Path) -> None:
        def change(writer: Any) -> None:
            writer.add_tokenizer_model("llama")

        checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=change))
        with pytest.raises(CheckpointError, match=r"tokenizer.ggml.model is 'llama'; supported is gpt2"):
            checkpoint.tokenizer()


class TestMetadata:
    @pytest.mark.parametrize(
        ("key", "value", "neutral"),
        [
            ("attention.scale", 1.0, TINY.head_dim**-0.5),
            ("logit_scale", 0.25, 1.0),
            ("embedding_scale", 12.0, 0.0),
            ("residual_scale", 0.22, 1.0),
            ("final_logit_softcapping", 30.0, 0.0),
            ("attn_logit_softcapping", 1.0, 0.0),
            ("attention.clamp_kqv", 8.0, 0.0),
            ("attention.max_alibi_bias", 8.0, 0.0),
            ("a_key_of_tomorrow", 3.0, 0.0),
            ("rope.freq_base", math.nan, 10_000.0),
            ("rope.freq_base", math.inf, 10_000.0),
        ],
    )
    def test_a_number_that_is_not_computed_is_refused(
        self, tmp_path: Path, key: str, value: float, neutral: float
    ) -> None:
        for number in (value, neutral):

            def change(writer: Any, number: float = number) -> None:
                writer.add_float32(f"llama.{key}", number)

            path = write_gguf(tmp_path / f"{number}.gguf", TINY, arrays(), change=change)
            if number is value:
                refused(path, "llama.*", f"{key} is ")
            else:
                assert GgufCheckpoint.open(path).config.rope_theta == 10_000.0

    def test_an_epsilon_that_is_no_number(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, arrays())
        stored = np.float32(TINY.rms_eps).tobytes()
        damaged = path.read_bytes().replace(stored, np.float32(math.nan).tobytes(), 1)
        path.write_bytes(damaged)
        refused(path, "attention.layer_norm_rms_epsilon is nan; expected a finite number")

    @pytest.mark.parametrize("factors", [np.ones(3, np.float32), np.ones((4, 1), np.float32)])
    def test_factors_of_another_length(self, tmp_path: Path, factors: Any) -> None:
        refused(
            write_gguf(tmp_path / "m.gguf", TINY, {**arrays(), "rope_freqs.weight": factors}),
            "rope_freqs.weight has shape",
            "expected [4]",
        )

    @pytest.mark.parametrize(("factor", "scaling"), [(2.0, LinearRope(2.0)), (0.0, None)])
    def test_a_factor_without_a_type_is_linear(self, tmp_path: Path, factor: float, scaling: LinearRope | None) -> None:
        def change(writer: Any) -> None:
            writer.add_rope_scaling_factor(factor)

        path = write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=change)
        assert GgufCheckpoint.open(path).config.rope_scaling == scaling

    def test_frequencies_are_not_stretched_twice(self, tmp_path: Path) -> None:
        def change(writer: Any) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(2.0)

        factors = {"rope_freqs.weight": np.ones(4, np.float32)}
        path = write_gguf(tmp_path / "m.gguf", TINY, {**arrays(), **factors}, change=change)
        refused(path, "rope_freqs.weight and rope.scaling.* metadata are both there")

    @pytest.mark.parametrize(
        ("name", "wrong", "neutral"),
        [("mirostat", 1, 0), ("xtc_probability", 1.0, 0.0), ("penalty_last_n", 1, -1), ("penalty_last_n", 0, -1)],
    )
    def test_sampling_that_is_not_done_is_named_whatever_its_value(
        self, name: str, wrong: object, neutral: object, caplog: pytest.LogCaptureFixture
    ) -> None:
        from_gguf({f"general.sampling.{name}": neutral, "general.sampling.mirostat_tau": 5.0}, "m.gguf")
        assert not caplog.text
        from_gguf({f"general.sampling.{name}": wrong}, "m.gguf")
        assert f"without effect: {name}" in caplog.text

    def test_recommended_sampling(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        def change(writer: Any) -> None:
            writer.add_float32(gguf.Keys.General.SAMPLING_TEMP, 0.5)
            writer.add_int32(gguf.Keys.General.SAMPLING_TOP_K, -1)
            writer.add_float32(gguf.Keys.General.SAMPLING_TOP_P, 2.0)
            writer.add_float32(gguf.Keys.General.SAMPLING_PENALTY_REPEAT, 1.5)
            writer.add_int32(gguf.Keys.General.SAMPLING_MIROSTAT, 2)

        checkpoint = GgufCheckpoint.open(write_gguf(tmp_path / "m.gguf", TINY, arrays(), change=change))
        assert checkpoint.sampling == SamplingParams(temperature=0.5, top_k=0, repetition_penalty=1.5)
        assert "top_p" in caplog.text
        assert "mirostat" in caplog.text
