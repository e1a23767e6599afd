"""The default model, for real: its weights, tokenizer and chat template against what transformers makes of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph.engine.checkpoints import INSTALL, GgufCheckpoint, default_model, open_checkpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.text import ChatTemplate, Detokenizer, Tokenizer
from phonograph.errors import CheckpointError

pytest.importorskip("gguf")
try:
    PATH = default_model()
except CheckpointError:
    pytest.skip(f"the default model is not installed: {INSTALL}", allow_module_level=True)

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "What is the capital of France?",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "it's we're I'VE they'll o'clock",
    "1234567890 3.14159 1,000,000 0x7f",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\nclass A(B): ...\n",
    '<div class="a">&amp; <br/></div>',
    "SELECT * FROM t WHERE a<=1 AND b!='x';",
    "Ünïcödé naïve façade ﬁ ß ẞ Å Å",
    "日本語のテキスト、中文字符，한국어 텍스트",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "👍 👩‍👩‍👧‍👦 🇫🇷 👋🏽 e\u0301 \u200b\ufeff\u00a0x",
    "\x00\x01\x7f\x80",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name> <|im_start |>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!! ......... ----------",
    "https://example.com/a/b?c=d&e=f#g  user@example.org",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β → γ",
]


@pytest.fixture(scope="module")
def checkpoint() -> GgufCheckpoint:
    opened = open_checkpoint()
    assert isinstance(opened, GgufCheckpoint)
    return opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: GgufCheckpoint) -> Tokenizer:
    return checkpoint.tokenizer()


@pytest.fixture(scope="module")
def template(checkpoint: GgufCheckpoint) -> ChatTemplate:
    return checkpoint.chat_template()


@pytest.fixture(scope="module")
def tensors(checkpoint: GgufCheckpoint) -> dict[str, torch.Tensor]:
    return dict(checkpoint.tensors())


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(PATH.parent), gguf_file=PATH.name)


@pytest.fixture(scope="module")
def their_model(checkpoint: GgufCheckpoint) -> Any:
    """Their class in our shape, without weights."""
    transformers = pytest.importorskip("transformers")
    from reference import reference_config

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(reference_config(checkpoint.config)).eval()


class TestFile:
    def test_the_configuration_is_that_of_the_published_model(self, checkpoint: GgufCheckpoint) -> None:
        config = replace(checkpoint.config, rms_eps=round(checkpoint.config.rms_eps, 9))
        assert config == SHAPES["smollm2-135m"]

    def test_names_shapes_and_quantisation_are_known_without_data(self, checkpoint: GgufCheckpoint) -> None:
        infos = checkpoint.names
        assert len(infos) == 272
        assert sum(torch.Size(info.shape).numel() for info in infos.values()) == 134_515_008
        stored = [info.stored for info in infos.values()]
        assert {kind: stored.count(kind) for kind in set(stored)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}

    @pytest.mark.parametrize(
        ("num_bytes", "where"),
        [
            (0, "empty"),
            (3, "the first bytes"),
            (20, "the first bytes"),
            (1_000_000, "tokenizer.ggml"),
            (2_000_000, "ends at 2000000"),
            (98_362_431, "output_norm|blk.29|ends at 98362431"),
        ],
    )
    def test_a_file_that_is_cut_short_is_refused_when_opened(self, tmp_path: Path, num_bytes: int, where: str) -> None:
        with PATH.open("rb") as file:
            (tmp_path / "cut.gguf").write_bytes(file.read(num_bytes))
        with pytest.raises(CheckpointError, match=rf"cut\.gguf.*({where}).*[Gg]et it again"):
            open_checkpoint(tmp_path / "cut.gguf")

    def test_a_damaged_header_is_refused(self, tmp_path: Path) -> None:
        shutil.copy(PATH, tmp_path / "bad.gguf")
        with (tmp_path / "bad.gguf").open("r+b") as file:
            file.seek(24)
            file.write((2**60).to_bytes(8, "little"))
        with pytest.raises(
            CheckpointError, match="metadata field 0 of 33: 1152921504606846976 bytes are wanted at byte 32"
        ):
            open_checkpoint(tmp_path / "bad.gguf")


class TestWeights:
    @pytest.mark.slow
    def test_every_tensor_is_what_transformers_makes_of_it(
        self, tensors: dict[str, torch.Tensor], their_model: Any
    ) -> None:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        theirs = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=their_model)["tensors"]
        assert sorted(theirs) == sorted(tensors)
        assert [name for name, tensor in tensors.items() if not torch.equal(tensor, theirs[name])] == []

    def test_the_tensors_are_what_their_infos_say(
        self, checkpoint: GgufCheckpoint, tensors: dict[str, torch.Tensor]
    ) -> None:
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        assert found == {name: (info.shape, info.dtype) for name, info in checkpoint.names.items()}

    def test_it_answers(
        self, tensors: dict[str, torch.Tensor], their_model: Any, tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        everything = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
        their_model.load_state_dict(everything, assign=True)
        their_model.model.rotary_emb = type(their_model.model.rotary_emb)(their_model.config)  # no tensor of its own
        prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
        ids = torch.tensor([tokenizer.encode(prompt, add_special=False)])
        with torch.inference_mode():
            out = their_model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        assert out[-1] in tokenizer.eos_ids
        text = Detokenizer(tokenizer)
        assert "".join(text.add([token]) for token in out) + text.finish() == "The capital of France is Paris."


class TestTokenizer:
    def test_facts(self, tokenizer: Tokenizer) -> None:
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49_152)
        assert tokenizer.special_ids == frozenset(range(17))
        assert tokenizer.token_id("<|im_end|>") == 2
        assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"

    @pytest.mark.parametrize("text", TEXTS)
    def test_the_ids_are_those_of_transformers(self, tokenizer: Tokenizer, their_tokenizer: Any, text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == their_tokenizer.encode(text, add_special_tokens=False)
        for skip in (True, False):
            theirs = their_tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special=skip) == theirs

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_comes_back(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text

    @pytest.mark.parametrize("number", ["1", "½", "²", "٣", "Ⅷ"])
    def test_every_digit_is_a_word(self, tokenizer: Tokenizer, number: str) -> None:
        """As in llama.cpp; transformers splits off ASCII digits alone in this file, which its vocabulary can't tell."""
        assert tokenizer.encode(f" {number}{number}") == tokenizer.encode(" ") + 2 * tokenizer.encode(number)

    def test_this_file_comes_back_one_token_at_a_time(self, tokenizer: Tokenizer, their_tokenizer: Any) -> None:
        source = Path(__file__).read_text(encoding="utf-8")
        ids = tokenizer.encode(source)
        assert ids == their_tokenizer.encode(source, add_special_tokens=False)
        stream = Detokenizer(tokenizer, skip_special=False)
        pieces = [stream.add([token]) for token in ids]
        assert "".join(pieces) + stream.finish() == source
        assert not any("\ufffd" in piece for piece in pieces)

    def test_every_token_is_the_bytes_that_transformers_decodes(
        self, tokenizer: Tokenizer, their_tokenizer: Any
    ) -> None:
        theirs = their_tokenizer.batch_decode([[i] for i in range(tokenizer.vocab_size)])
        ours = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(tokenizer.vocab_size)]
        assert ours == theirs


class TestChat:
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    @pytest.mark.parametrize(
        "messages",
        [
            [{"role": "user", "content": "Hi"}],
            [{"role": "system", "content": "Be <b>brief</b> & 'kind'."}, {"role": "user", "content": "Hi\n\n "}],
            [
                {"role": "user", "content": "日本語 👍"},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": "{{ messages }} {% if %}"},
            ],
        ],
    )
    def test_the_prompt_is_that_of_transformers(
        self, template: ChatTemplate, their_tokenizer: Any, messages: list[Any], add_generation_prompt: bool
    ) -> None:
        theirs = their_tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        assert template.render(messages, add_generation_prompt=add_generation_prompt) == theirs
