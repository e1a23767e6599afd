"""Damaged checkpoints: refused with a sentence, or read as independent readers read the same bytes; never slow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from phonograph.engine.checkpoints import RandomCheckpoint, open_checkpoint
from phonograph.engine.checkpoints.loading import load_weights
from phonograph.errors import CheckpointError
from unit.test_gguf import TINY, arrays, gguf, write_gguf

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": TINY.num_layers,
    "hidden_size": TINY.hidden,
    "intermediate_size": TINY.intermediate,
    "num_attention_heads": TINY.num_heads,
    "num_key_value_heads": TINY.num_kv_heads,
    "head_dim": TINY.head_dim,
    "vocab_size": TINY.vocab,
    "max_position_embeddings": TINY.max_len,
}
MOST_SECONDS = 5.0
"""A tenth is usual; a machine that does other things besides needs room."""
NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 31, 32, 33, 64, 127, 2**31, 2**63, 2**64, 10**40, 0.5, None, "32", True])

_run = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(RandomCheckpoint(TINY).tensors()), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def original(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def change(writer: Any) -> None:
        writer.add_rope_freq_base(20_000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([chr(ord("0") + token) for token in range(TINY.vocab - 1)] + ["01"])
        writer.add_token_types([1] * (TINY.vocab - 1) + [3])
        writer.add_token_merges(["0 1"])
        writer.add_bos_token_id(3)
        writer.add_eos_token_id(5)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ messages }}")

    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", TINY, arrays(), change=change)


@pytest.fixture(scope="module")
def gguf_original(gguf_file: Path) -> bytes:
    return gguf_file.read_bytes()


def loaded(path: Path) -> dict[str, torch.Tensor] | None:
    """All tensors, or None if the checkpoint is refused with a sentence; anything else is an error, or too slow."""
    begin = time.perf_counter()
    try:
        checkpoint = open_checkpoint(path)
        if path.suffix == ".gguf":
            checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("t1"))
            assert checkpoint.chat_template() is not None
        load_weights(checkpoint, torch.float32, torch.device("cpu"))
        return dict(checkpoint.tensors())
    except CheckpointError:
        return None
    finally:
        assert time.perf_counter() - begin < MOST_SECONDS


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and torch.equal(found.float(), wanted.float())


def with_header(original: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(original[:8], "little")
    header = json.loads(original[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + original[8 + length :]


def damaged(draw: st.DrawFn, data: bytes, end: int) -> bytes:
    """Some bytes changed, cut out, put in or repeated before `end`, or the file cut or lengthened."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, end - 1))
        match draw(st.sampled_from(["byte", "byte", "byte", "bit", "long", "insert", "remove", "cut", "more"])):
            case "byte":
                changed[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "bit" if place < len(changed):
                changed[place] ^= 1 << draw(st.integers(0, 7))
            case "long":
                changed[place : place + 8] = draw(st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1])).to_bytes(
                    8, "little"
                )
            case "insert":
                changed[place:place] = draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del changed[place : place + draw(st.integers(1, 9))]
            case "cut":
                del changed[draw(st.integers(0, len(changed))) :]
            case "more":
                changed += draw(st.binary(min_size=1, max_size=9))
    return bytes(changed)


class TestSafetensors:
    def check(self, folder: Path, data: bytes) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(data)
        found = loaded(folder)
        if found is not None:
            theirs = load_file(path)
            assert all(equal(tensor, theirs[name]) for name, tensor in found.items())

    @_run
    @given(st.data())
    def test_bytes(self, folder: Path, original: bytes, data: st.DataObject) -> None:
        end = 8 + int.from_bytes(original[:8], "little")
        self.check(folder, damaged(data.draw, original, end))  # type: ignore[arg-type]

    @_run
    @given(st.data())
    def test_places_and_shapes(self, folder: Path, original: bytes, data: st.DataObject) -> None:
        def change(header: dict[str, Any]) -> None:
            names = [name for name in header if name != "__metadata__"]
            fields = header[data.draw(st.sampled_from(names))]
            other = header[data.draw(st.sampled_from(names))]
            kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "swap", "extra", "gone", "whole"]))
            if kind == "dtype":
                fields["dtype"] = data.draw(st.sampled_from(["F64", "F32", "F16", "BF16", "I32", "U8", "F8_E4M3", 3]))
            elif kind in ("shape", "data_offsets"):
                fields[kind] = data.draw(st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS))
            elif kind == "swap":
                for name in ("shape", "data_offsets"):
                    fields[name], other[name] = other[name], fields[name]
            elif kind == "extra":
                fields[data.draw(st.text(max_size=4))] = data.draw(NUMBERS)
            elif kind == "gone":
                fields.pop(data.draw(st.sampled_from(["dtype", "shape", "data_offsets"])))
            else:
                header[data.draw(st.sampled_from([*names, "__metadata__", "new"]))] = data.draw(NUMBERS)

        self.check(folder, with_header(original, change))

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda data: data + b"\0", "but there are"),
            (lambda data: data[:8] + b'{"a":' * 5000 + data[8:], "header"),
            (lambda data: (2**63).to_bytes(8, "little") + data[8:], "header should be"),
        ],
    )
    def test_known_damage_is_named(
        self, folder: Path, original: bytes, spoil: Callable[[bytes], bytes], said: str
    ) -> None:
        (folder / "model.safetensors").write_bytes(spoil(original))
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(folder)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
            (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "'dtype' is there twice"),
            (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
            (b'{"__metadata__": {"a": 1}}', "can't be read"),
        ],
    )
    def test_headers_that_can_not_be(self, folder: Path, text: bytes, said: str) -> None:
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(folder)

    def test_an_enormous_header_is_not_read(self, folder: Path) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            file.write((2**32).to_bytes(8, "little"))
            file.truncate(2**33)  # a hole: nothing is written
        with pytest.raises(CheckpointError, match="the format allows"):
            open_checkpoint(folder)

    def test_embeddings_of_two_precisions_are_compared(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
        tensors = dict(RandomCheckpoint(TINY).tensors())
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"lm_head.weight differs"):
            dict(open_checkpoint(tmp_path).tensors())


class TestGguf:
    @_run
    @given(st.data())
    def test_bytes(self, gguf_file: Path, gguf_original: bytes, data: st.DataObject) -> None:
        end = gguf_original.index(b"blk.1.ffn_down.weight") + 60  # the header and the first tensors
        gguf_file.write_bytes(damaged(data.draw, gguf_original, end))  # type: ignore[arg-type]
        found = loaded(gguf_file)
        if found is None:
            return
        theirs = gguf.GGUFReader(gguf_file)
        values = [np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in theirs.tensors]
        assert sorted(sum_of(value) for value in values) == sorted(sum_of(tensor.numpy()) for tensor in found.values())
        checkpoint = open_checkpoint(gguf_file)
        for key, found_value, default in (
            ("rope.freq_base", checkpoint.config.rope_theta, 10_000.0),
            ("attention.layer_norm_rms_epsilon", checkpoint.config.rms_eps, None),
            ("context_length", checkpoint.config.max_len, None),
        ):
            said = theirs.get_field(f"llama.{key}")
            assert found_value == (default if said is None else said.contents())

    def test_counts_beyond_all_files_are_refused_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        for counts, said in (((2**40, 1), "tensors"), ((1, 2 * 10**8), "metadata fields")):
            with path.open("wb") as file:
                file.write(
                    b"GGUF" + (3).to_bytes(4, "little") + b"".join(count.to_bytes(8, "little") for count in counts)
                )
                file.truncate(2**32)  # zeros, of which 13 are a field without a name
            assert loaded(path) is None
            with pytest.raises(CheckpointError, match=f"{said}; expected at most"):
                open_checkpoint(path)

    @pytest.mark.parametrize(("kind", "said"), [(8, "items of arrays"), (0, "items of arrays")])
    def test_arrays_beyond_all_files_are_refused_at_once(self, tmp_path: Path, kind: int, said: str) -> None:
        path = tmp_path / "m.gguf"
        head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        array = (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little") + kind.to_bytes(4, "little")
        with path.open("wb") as file:
            file.write(head + array + (2 * 10**8).to_bytes(8, "little"))
            file.truncate(2**32)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(path)

    def test_a_field_that_is_there_twice(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        field = (1).to_bytes(8, "little") + b"a" + (0).to_bytes(4, "little") + b"\1"
        counts = (0).to_bytes(8, "little") + (2).to_bytes(8, "little")
        path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + counts + field * 2)
        with pytest.raises(CheckpointError, match="'a' is there twice"):
            open_checkpoint(path)

    def test_one_part_of_several_is_called_so(self, tmp_path: Path) -> None:
        def change(writer: Any) -> None:
            writer.add_uint16("split.no", 1)
            writer.add_uint16("split.count", 3)

        path = write_gguf(tmp_path / "m-00002-of-00003.gguf", TINY, {}, change=change)
        with pytest.raises(CheckpointError, match=r"part 2 of 3 of a split model.*llama-gguf-split --merge"):
            open_checkpoint(path)

    def test_a_count_of_layers_beyond_all_models(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", TINY, arrays())
        key = b"llama.block_count" + (4).to_bytes(4, "little")
        data = path.read_bytes()
        place = data.index(key) + len(key)
        for count in (2**31, 9_999):
            path.write_bytes(data[:place] + count.to_bytes(4, "little") + data[place + 4 :])
            assert loaded(path) is None


def sum_of(values: Any) -> float:
    """A number that tells tensors apart; those of a `llama` have another order of rows in the file."""
    return math.fsum(np.abs(values.astype(np.float64)).ravel())
