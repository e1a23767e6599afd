"""Text parts: tokenizers of both file formats, detokenizer, stop strings, chat templates."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from phonograph.engine.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer
from phonograph.engine.text.gguf_vocabulary import PRE_TOKENIZERS
from phonograph.engine.text.pieces import byte_level_bytes
from phonograph.errors import CheckpointError, RequestError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<tool>"]
MERGES = ["h e", "l l", "he ll", "Ġ hell", "1 2", "12 3", "Ã ©"]


def gguf_metadata(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary with a few merges, two control tokens and a user-defined one."""
    tokens = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def made(**changes: object) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata(**changes), eos_ids=(1,))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [
        tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokenizer.encode(text, add_special=False)
    ]


def sentencepiece() -> tokenizers.Tokenizer:
    """A vocabulary as Llama 2's tokenizer.json has it: ▁ for spaces, and bytes for what it has no token for."""
    plain = ["▁", "h", "i", "▁h", "▁hi", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("▁", "h"), ("▁h", "i"), ("▁", "▁")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class TestByteLevel:
    def test_special_tokens_are_found_and_left_out(self) -> None:
        tokenizer = made()
        ids = tokenizer.encode("<s>hell</s><tool>")
        assert ids == [0, tokenizer.token_id("hell"), 1, 2]
        assert tokenizer.decode(ids) == "hell<tool>"
        assert tokenizer.decode(ids, skip_special=False) == "<s>hell</s><tool>"
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (0, (1,), frozenset({0, 1}))

    def test_ids_that_are_no_token_are_no_text(self) -> None:
        tokenizer = made()
        assert tokenizer.vocab_size == len(SPECIAL) + 256 + len(MERGES)
        assert tokenizer.decode([10**6, -1, tokenizer.vocab_size]) == ""

    @pytest.mark.parametrize(("fields", "around"), [({}, "{}"), ({"add_bos_token": True}, "<s>{}")])
    def test_bos_is_added_where_the_metadata_say(self, fields: dict[str, object], around: str) -> None:
        tokenizer = made(**fields)
        assert tokenizer.decode(tokenizer.encode("hi"), skip_special=False) == around.format("hi")
        assert tokenizer.decode(tokenizer.encode("hi", add_special=False), skip_special=False) == "hi"

    def test_eos_is_added_where_the_metadata_say(self) -> None:
        tokenizer = made(add_bos_token=True, add_eos_token=True)
        assert tokenizer.encode("") == [0, 1]

    def test_halves_of_characters_are_refused(self) -> None:
        with pytest.raises(RequestError, match=r"half of a surrogate pair \('\\ud800' at character 1\)"):
            made().encode("a\ud800")

    def test_a_token_that_is_not_spelled_in_bytes_stands_for_itself(self) -> None:
        assert byte_level_bytes("Ġé") == b" \xe9"
        assert byte_level_bytes("<|a b|>") == b"<|a b|>"
        assert byte_level_bytes("<｜▁｜>") == "<｜▁｜>".encode()


class TestPreTokenizers:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [("gpt-2", ["123"]), ("smollm", ["1", "2", "3"]), ("llama-bpe", ["123"]), ("qwen2", ["1", "2", "3"])],
    )
    def test_digits(self, name: str, expected: list[str]) -> None:
        assert words(made(pre=name), "123") == expected

    def test_llama_takes_three_digits_at_a_time_and_adds_bos(self) -> None:
        tokenizer = made(pre="llama-bpe")
        assert words(tokenizer, "123123") == ["123", "123"]
        assert tokenizer.encode("") == [0]
        assert made(pre="llama-bpe", add_bos_token=False).encode("") == []

    def test_qwen2_composes_characters(self) -> None:
        assert words(made(pre="qwen2"), "e\u0301") == ["é"]
        assert words(made(pre="llama-bpe", add_bos_token=False), "e\u0301") != ["é"]

    @pytest.mark.parametrize("name", PRE_TOKENIZERS)
    @pytest.mark.parametrize(
        "text", ["  hello\n\n hell 123,45 it's IT'S é 日本 👍🏽\t\r\n  x  ", "a" * 50, "\x00\x7f\xa0"]
    )
    def test_text_comes_back(self, name: str, text: str) -> None:
        tokenizer = made(pre=name)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_qwen2_is_that_of_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        metadata = gguf_metadata()
        tokens: Any = metadata["tokenizer.ggml.tokens"]
        theirs = transformers.Qwen2Tokenizer(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in MERGES],
            unk_token="<s>",
            eos_token="</s>",
            pad_token="</s>",
        )
        ours = made(pre="qwen2", token_type=[3, 3, *[1] * (len(tokens) - 2)])
        for text in [
            "hello hell 12345",
            " \n\n  hell'LL\r\n",
            "e\u0301 ﬁ ½ ٣ 日本語 👍🏽",
            "a.b,c!?\n\n\t\tx",
            "</s>hell<s>",
        ]:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


class TestRefusedVocabularies:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"model": "llama"}, "model is 'llama'; supported is gpt2"),
            ({"pre": "tekken"}, "pre is 'tekken'; supported are .*smollm"),
            ({"pre": None}, "pre is 'default'"),
            ({"tokens": []}, "tokens has 0 entries"),
            ({"tokens": ["a", "a"], "token_type": None, "merges": None}, "1 are there twice"),
            ({"merges": ["he"]}, "merges has 'he'"),
            ({"merges": ["x yz"]}, "merges don't fit"),
            ({"token_type": [1]}, "token_type has 1 entries"),
            ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
            ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ],
    )
    def test_gguf(self, changes: dict[str, object], match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            made(**changes)

    def test_no_tokenizer_json(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tokenizer.json.*save_pretrained"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("text", ["{", "{}", "[]"])
    def test_bad_tokenizer_json(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer.json: not a tokenizer"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
    def test_a_decoder_that_is_not_known(self, decoder: Any) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(CheckpointError, match=r"its decoder is .*ByteLevel"):
            Tokenizer(backend, {})


class TestFolders:
    def test_sentencepiece_text_is_that_of_the_library(self, tmp_path: Path) -> None:
        backend = sentencepiece()
        tokenizer = Tokenizer.from_folder(save(tmp_path, backend, bos_token="<s>", eos_token={"content": "</s>"}))
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
        for text in ["hi", " hi hi", "   hi", "é👍", "", " "]:
            ids = tokenizer.encode(text)
            assert ids == backend.encode(text).ids
            assert ids[0] == 1
            assert tokenizer.decode(ids) == backend.decode(ids) == text

    @pytest.mark.parametrize("prompt", ["", " ", "hi", " hi", "<s>", "é"])
    @pytest.mark.parametrize("answer", [["▁hi"], ["▁▁", "▁hi"], ["▁", "▁", "h"], ["h"], ["<0x20>", "i"]])
    def test_a_continued_text_is_what_the_library_adds(self, tmp_path: Path, prompt: str, answer: list[str]) -> None:
        backend = sentencepiece()
        tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
        ids = [backend.token_to_id(token) or 0 for token in answer]
        before = tokenizer.encode(prompt)
        stream = Detokenizer(tokenizer, after=before)
        text = "".join([stream.add([token]) for token in ids]) + stream.finish()
        assert backend.decode(before) + text == backend.decode([*before, *ids])

    def test_an_answer_that_continues_nothing_begins_without_the_space(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_folder(save(tmp_path, sentencepiece()))
        ids = [tokenizer.token_id("▁▁") or 0, tokenizer.token_id("▁hi") or 0]
        assert Detokenizer(tokenizer).add(ids) == tokenizer.decode(ids) == "  hi"

    def test_eos_is_also_what_the_configuration_says(self, tmp_path: Path) -> None:
        folder = save(tmp_path, sentencepiece(), eos_token="</s>")
        assert Tokenizer.from_folder(folder, eos_ids=(7, 2)).eos_ids == (7, 2)
        assert Tokenizer.from_folder(folder, eos_ids=(7,)).eos_ids == (7, 2)

    def test_limits_of_the_training_run_are_dropped(self, tmp_path: Path) -> None:
        backend = sentencepiece()
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
        tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
        assert tokenizer.decode(tokenizer.encode("hi " * 10)) == "hi " * 10

    def test_added_tokens_with_spaces_are_text(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.add_tokens([AddedToken("<a b>"), AddedToken("日本", special=True)])
        tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
        ids = tokenizer.encode("x<a b>日本y")
        assert len(ids) == 4
        assert (
            tokenizer.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False) == "x<a b>日本y"
        )
        assert tokenizer.decode(ids) == "x<a b>y"


MAP = "special_tokens_map.json"
SIDE_FILES: dict[str, dict[str, dict[str, object]]] = {
    "listed in the configuration": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "256": {"content": "<im>", "special": True, "lstrip": True},
                "257": {"content": "<think>", "normalized": False, "special": False},
                "258": {"content": "<end>"},
            },
            "eos_token": "<end>",
            "extra_special_tokens": {"image_token": "<im>", "video_token": "<vid>"},
        },
        MAP: {"eos_token": "<im>", "bos_token": "<think>"},
        "added_tokens.json": {"<not read>": 256},
    },
    "of their own file": {
        "tokenizer_config.json": {"additional_special_tokens": ["<im>"]},
        "added_tokens.json": {"<im>": 256, "<think>": 257, "<end>": 258},
        MAP: {"eos_token": {"content": "<end>", "lstrip": False, "normalized": False}},
    },
    "in the map alone": {MAP: {"bos_token": "<im>", "eos_token": {"content": "<end>"}, "pad_token": None}},
    "in a map that disagrees": {
        "tokenizer_config.json": {"bos_token": "<think>", "eos_token": "<im>", "image_token": "<im>"},
        MAP: {"eos_token": "<end>", "bos_token": None, "additional_special_tokens": ["<think>"]},
    },
}


def with_side_files(folder: Path, files: dict[str, dict[str, object]]) -> Path:
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save(folder, backend, tokenizer_class="PreTrainedTokenizerFast")
    for name, fields in files.items():
        more = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config.json" else {}
        (folder / name).write_text(json.dumps(more | fields))
    return folder


class TestSideFiles:
    @pytest.mark.parametrize("case", SIDE_FILES)
    def test_they_say_what_transformers_reads(self, tmp_path: Path, case: str) -> None:
        transformers = pytest.importorskip("transformers")
        folder = with_side_files(tmp_path, SIDE_FILES[case])
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = Tokenizer.from_folder(folder)
        assert theirs.eos_token == "<end>"
        assert ours.special_tokens == theirs.special_tokens_map
        assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
        ids = ours.encode("a <im>b<think> c<vid><end>")
        assert ids == theirs.encode("a <im>b<think> c<vid><end>")
        assert ours.token_id("<end>") in ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
        template = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}"
        (folder / "chat_template.jinja").write_text(template)
        rendered = theirs.apply_chat_template(HI, chat_template=template, tokenize=False)
        assert ChatTemplate.from_folder(folder).render(HI) == rendered

    @pytest.mark.parametrize(
        ("name", "fields", "match"),
        [
            ("added_tokens.json", {"<im>": 300}, r"added_tokens.json: the token '<im>' should have the id 300.* 256"),
            ("added_tokens.json", {"a": 3}, "the token 'a' should have the id 3"),
            ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "'x' is no token id"),
            ("tokenizer_config.json", {"added_tokens_decoder": {"256": "<im>"}}, "256 is '<im>'; expected an object"),
            ("tokenizer_config.json", {"extra_special_tokens": [3]}, "extra_special_tokens: 0 is 3; expected a string"),
            (MAP, {"eos_token": 3}, "special_tokens_map.json: eos_token is 3; expected a string"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, tmp_path: Path, name: str, fields: Any, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            Tokenizer.from_folder(with_side_files(tmp_path, {name: fields}))


class TestSwitches:
    @pytest.mark.parametrize(
        ("name", "done"),
        [
            ("add_bos_token", True),
            ("add_eos_token", False),
            ("add_prefix_space", True),
            ("split_special_tokens", False),
        ],
    )
    def test_one_that_the_tokenizer_json_does_not_follow_is_named(
        self, tmp_path: Path, name: str, done: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        roles = {"bos_token": "<s>", "eos_token": "</s>"}
        for said in (done, None):
            Tokenizer.from_folder(save(tmp_path, sentencepiece(), **roles, **{name: said}))
            assert not caplog.text
        Tokenizer.from_folder(save(tmp_path, sentencepiece(), **roles, **{name: not done}))
        assert f"does otherwise: {name} {str(not done).lower()}" in caplog.text
        assert len(caplog.records) == 1

    def test_all_of_them_in_one_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab={"x": 0}, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        asked = {"add_bos_token": False, "add_eos_token": True, "add_prefix_space": True, "added_tokens_decoder": {}}
        Tokenizer.from_folder(save(tmp_path, backend, **asked))
        assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
            "without effect, as the tokenizer.json of the same folder does otherwise: "
            "add_eos_token true, add_prefix_space true"
        ]


class TestDetokenizer:
    def test_a_character_is_held_back_until_it_is_whole(self) -> None:
        tokenizer = made()
        ids = tokenizer.encode("a👍b")
        stream = Detokenizer(tokenizer)
        assert [stream.add([token]) for token in ids] == ["a", "", "", "", "👍", "b"]
        assert stream.finish() == ""

    def test_a_character_that_is_never_whole(self) -> None:
        tokenizer = made()
        stream = Detokenizer(tokenizer)
        assert stream.add(tokenizer.encode("👍")[:3]) == ""
        assert stream.finish() == "\ufffd"

    def test_special_tokens(self) -> None:
        tokenizer = made()
        assert Detokenizer(tokenizer).add([0, 1, 2]) == "<tool>"
        assert Detokenizer(tokenizer, without=[2]).add([0, 1, 2]) == ""
        assert Detokenizer(tokenizer, skip_special=False).add([0, 1, 2]) == "<s></s><tool>"


class TestStops:
    def test_a_stop_over_many_pieces_never_shows(self) -> None:
        stops = StopStrings(["<END>"])
        assert [stops.add(piece) for piece in ["a<", "E", "N", "D", ">x"]] == [
            ("a", None), ("", None), ("", None), ("", None), ("", "<END>"),
        ]  # fmt: skip
        assert stops.add("more") == ("", "<END>")
        assert stops.flush() == ""

    def test_what_turns_out_to_be_no_stop_is_given_out_at_once(self) -> None:
        stops = StopStrings(["<END>"])
        assert stops.add("a<EN") == ("a", None)
        assert stops.add("<E") == ("<EN", None)
        assert stops.add("x") == ("<Ex", None)
        assert stops.add("<") == ("", None)
        assert stops.flush() == "<"

    def test_the_first_to_be_complete_counts(self) -> None:
        assert StopStrings(["abcd", "bc"]).add("xabcd") == ("xa", "bc")
        assert StopStrings(["ab", "b"]).add("xab") == ("x", "ab")
        assert StopStrings(["a", "ab"]).add("xab") == ("x", "a")

    def test_choices_share_the_strings_and_nothing_else(self) -> None:
        first = StopStrings(["<END>"])
        second = first.again()
        assert first.add("a<EN") == ("a", None)
        assert second.add("D>b") == ("D>b", None)
        assert first.add("D>") == ("", "<END>")
        assert first.again().add("<EN") == ("", None)

    def test_long_strings_cost_what_matches_of_them(self) -> None:
        tracemalloc.start()
        begin = time.thread_time()
        first = StopStrings(["a" * 500_000 + chr(65 + number) for number in range(16)])
        choices = [first.again() for _ in range(128)]
        for choice in choices:
            for _ in range(20):
                assert choice.add("some more text") == ("some more text", None)
        assert choices[0].add("a" * 50 + "!") == ("a" * 50 + "!", None)
        seconds, (_, most) = time.thread_time() - begin, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert seconds < 2
        assert most < 10 << 20  # not even twice the strings: no table is made before text matches

    def test_without_stops_all_passes(self) -> None:
        stops = StopStrings([])
        assert stops.add("text") == ("text", None)
        assert stops.flush() == ""

    @pytest.mark.parametrize("bad", [[""], "abc", ["a", 3]])
    def test_bad_stops(self, bad: Any) -> None:
        with pytest.raises(RequestError, match="stop strings"):
            StopStrings(bad)


CHATML = (
    "{%- if tools %}\n    {{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "    {%- if loop.first and message.role == 'tool' %}{{ raise_exception('A chat starts with a user') }}{% endif %}\n"
    "    {{- '<|' + message.role + '|>' }}{% generation %}{{ message['content'] | trim }}{% endgeneration %}\n"
    "    {%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ bos_token }}{{ strftime_now('%Y') }}{{ enable_thinking | default('no') }}"
    "{%- endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


class TestChat:
    @pytest.mark.parametrize(
        ("messages", "options"),
        [
            (HI, {}),
            (HI, {"add_generation_prompt": False}),
            ([{"role": "system", "content": " <b>é</b> & \"'\n"}, *HI], {"tools": [{"name": "f", "doc": "<é>"}]}),
            (
                [*HI, {"role": "assistant", "content": "", "tool_calls": [{"id": 1, "arguments": {"b": 1, "a": []}}]}],
                {},
            ),
        ],
    )
    def test_it_renders_as_transformers_does(self, messages: list[Any], options: dict[str, Any]) -> None:
        pytest.importorskip("transformers")
        from transformers.utils.chat_template_utils import render_jinja_template

        asked = {"add_generation_prompt": True, **options}
        theirs, _ = render_jinja_template([messages], chat_template=CHATML, bos_token="<s>", **asked)
        assert ChatTemplate(CHATML, {"bos_token": "<s>"}).render(messages, **options) == theirs[0]

    def test_further_variables(self) -> None:
        rendered = ChatTemplate(CHATML).render(HI, variables={"enable_thinking": "yes"})
        assert rendered.endswith("yes")

    @pytest.mark.parametrize("name", ["enable_thinkng", "messages", "add_generation_prompt", "raise_exception"])
    def test_a_variable_that_does_nothing_is_refused(self, name: str) -> None:
        with pytest.raises(RequestError, match=f"does not read '{name}'; what it reads: .*enable_thinking") as found:
            ChatTemplate(CHATML).render(HI, variables={name: "x"})
        assert found.value.field == "chat_template_kwargs"

    def test_text_parts_are_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"

    @pytest.mark.parametrize(
        ("messages", "match"),
        [
            ([], "no messages"),
            ("Hi", "no messages"),
            (["Hi"], r"messages\[0\] is a str"),
            ([{"content": "Hi"}], r"messages\[0\] has the role None; expected one of system"),
            ([*HI, {"role": "robot", "content": "Hi"}], r"messages\[1\] has the role 'robot'"),
            ([{"role": "user"}], "no content"),
            ([{"role": "user", "content": 3}], "content of type int"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
            ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
            ([{"role": "tool", "content": "x"}], "A chat starts with a user"),
        ],
    )
    def test_bad_messages(self, messages: Any, match: str) -> None:
        with pytest.raises(RequestError, match=match):
            ChatTemplate(CHATML).render(messages)

    def test_a_template_that_trips_over_the_messages(self) -> None:
        calls: list[dict[str, object]] = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
        with pytest.raises(RequestError, match="TypeError"):
            ChatTemplate("{{ 'x' + messages[0].tool_calls }}").render(calls)
        assert ChatTemplate("{{ 'x' + messages[0].content }}").render(calls) == "x", "no content is an empty text"
        told_by_none = "{{ 'call' if messages[0].content is none else 'text' }}"
        assert ChatTemplate(told_by_none).render(calls) == "call"

    @pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
    def test_the_sandbox(self, template: str) -> None:
        with pytest.raises(RequestError, match="SecurityError"):
            ChatTemplate(template).render(HI)

    def test_a_template_that_fails_is_told_from_one_that_refuses(self) -> None:
        with pytest.raises(RequestError, match=r"the template of m failed with ZeroDivisionError: .*the template, or"):
            ChatTemplate("{{ 1 // 0 }}", source="m").render(HI)
        with pytest.raises(RequestError, match=r"the template of m refuses the messages: roles\. Change them"):
            ChatTemplate("{{ raise_exception('roles') }}", source="m").render(HI)

    def test_no_template(self, tmp_path: Path) -> None:
        template = ChatTemplate.from_folder(tmp_path)
        with pytest.raises(RequestError, match=r"has no chat template\. Send a prompt"):
            template.render(HI)

    def test_a_template_with_a_mistake(self) -> None:
        with pytest.raises(CheckpointError, match="opening the chat template of m"):
            ChatTemplate("{% if %}", source="m")

    def test_where_a_folder_keeps_it(self, tmp_path: Path) -> None:
        config = tmp_path / "tokenizer_config.json"
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "{{ eos_token }}2"}]
        config.write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ eos_token }}1"}))
        assert ChatTemplate.from_folder(tmp_path).render(HI) == "</s>1"
        config.write_text(json.dumps({"eos_token": "</s>", "chat_template": named}))
        assert ChatTemplate.from_folder(tmp_path).render(HI) == "</s>2"
        (tmp_path / "chat_template.jinja").write_text("3")
        assert ChatTemplate.from_folder(tmp_path).render(HI) == "3"

    @pytest.mark.parametrize("found", [3, [{"name": "rag", "template": "x"}]])
    def test_a_template_that_is_none(self, tmp_path: Path, found: object) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
        with pytest.raises(CheckpointError, match="chat_template"):
            ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "whole"),
    [
        ("{{ messages }}", False),
        ("{{ tools | tojson }}", True),
        ("{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}", True),
        ("{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}", True),
        ("{% for tool in tools %}{{ tool['function'] | tojson }}{% endfor %}", True),
        ("{{ tools[0] | tojson }}", True),
        ("{{ tools }}", True),
        ("{% set listed = tools %}{% for t in listed %}{% set f = t.function %}{{ f | tojson }}{% endfor %}", True),
        ("{% for tool in tools %}{% for k, v in tool.function.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}", True),
        ("{% macro show(x) %}{{ x | tojson }}{% endmacro %}{% for t in tools %}{{ show(t) }}{% endfor %}", True),
        ("{% for t in tools %}{{ t.function.name }}{{ t.function.parameters | tojson }}{% endfor %}", False),
        ("{% if tools and tools | length > 1 %}{{ tools[0].function.description }}{% endif %}", False),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}{% for t in tools %}{{ t.name }}{% endfor %}", False),
    ],
)
def test_a_template_is_known_to_show_tools_whole(template: str, whole: bool) -> None:
    assert ChatTemplate(template).shows_tools_whole is whole


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}", "[system]Be brief.[user]a"),
        (
            "{% for m in messages %}{{ '!' if m.role == 'developer' else '?' }}{{ m['content'] }}{% endfor %}",
            "!Be brief.?a",
        ),
        (
            "You are a developer. {% for m in messages %}[{{ m['role'] }}]{% endfor %}",
            "You are a developer. [system][user]",
        ),
    ],
)
def test_a_developers_message_is_a_system_message_unless_the_template_knows_it(template: str, expected: str) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert ChatTemplate(template).render(messages, add_generation_prompt=False) == expected
