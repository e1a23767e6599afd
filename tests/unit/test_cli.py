"""The command line: what it prints, and how it refuses."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phonograph import CheckpointError
from phonograph.cli import explain
from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.cli.main import command_line, main
from phonograph.engine.checkpoints import default_model, open_checkpoint
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.shadow import shadowing_for
from phonograph.engine.models.registry import config_from_hf
from phonograph.engine.options import EngineOptions
from phonograph.engine.precision import precision_for
from server import tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def default() -> None:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))


def test_generate_answers_with_the_default_model(default: None, capsys: Capture) -> None:
    status = main(["generate", "--chat", "--prompt", "What is the capital of France?", "--report", "--device", "cpu"])
    out = capsys.readouterr().out
    assert status == 0
    assert out.startswith("The capital of France is Paris.\n")
    assert "tokens/s" in out
    assert "decode.backend   disabled  measured" in out
    assert "emulated" not in out.replace("device='emulated'", ""), "nothing is emulated here"


def test_a_generation_that_fails_is_told_and_ends_with_a_status(default: None, capsys: Capture) -> None:
    strict = ["--graphs", "strict", "--device", "cpu"]
    assert main(["generate", "--prompt", "One, two,", *strict]) == 2
    assert "every phase's backend is disabled" in capsys.readouterr().err
    assert main(["generate", "--prompt", "One, two,", *strict, "--ignore-rule", "strict-needs-graphs"]) == 2
    assert "strict: decode has no graph for some batches that may come" in capsys.readouterr().err


def test_explain_shows_the_ops_of_a_phase_with_their_lines(capsys: Capture) -> None:
    flags = ["--shape", "tiny", "--device", "emulated", "--max-seqs", "2", "--max-len", "64", "--max-step-tokens", "8"]
    assert main(["explain", *flags, "--trace", "decode"]) == 0
    out = capsys.readouterr().out
    assert "coverage of decode, seqs 1 to 2 × 3 products: 6 of 6 have a graph" in out
    assert "decode[seqs=1, sampling=detailed]: " in out
    assert "decode.py:" in out
    assert "\nprefill[" not in out
    assert main(["explain", *flags, "--trace", "decoder"]) == 2
    assert "decode" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_on_the_graph_path_as_json(default: None, capsys: Capture) -> None:
    flags = ["--device", "emulated", "--max-len", "64", "--max-seqs", "1", "--prefill-graph-limit", "16"]
    assert main(["generate", "--prompt", "One, two, three,", "--max-tokens", "4", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finish"] == "length"
    assert len(found["tokens"]) == 4
    assert main(["generate", "--prompt", "One, two, three,", "--max-tokens", "4", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == found["tokens"]


def test_explain_needs_no_weights(capsys: Capture) -> None:
    flags = ["--shape", "qwen3-8b", "--device", "emulated", "--max-seqs", "4", "--max-len", "1024"]
    assert main(["explain", *flags, "--decode-graph-backend", "breakable"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3-8b: 36 layers of 4096, vocabulary of 151,936; up to 4 sequences of 1,024 tokens")
    assert "decode.backend   breakable  asked" in out
    assert "prefill.backend  breakable  default" in out
    assert "draft" not in out, "a phase that this engine does not have"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "off"),
        (("--speculate", "ngram"), "ngram, 3 a round, wherever a request allows drafts"),
        (
            ("--speculate", "auto", "--speculate-depth", "2", "--speculate-when", "pays"),
            "ngram (auto: no head comes with this model, and --draft names none), 2 a round, where that pays "
            "(what a round costs is measured at start)",
        ),
        (
            ("--speculate", "ngram", "--speculate-when", "pays", "--device", "cpu"),
            "ngram, 3 a round, wherever a request allows drafts (where that pays is not known, since rounds are not "
            "recorded)",
        ),
        (("--speculate", "ngram", "--device", "cpu"), "ngram, 3 a round, wherever a request allows drafts"),
    ],
)
def test_explain_says_who_drafts_and_when(flags: tuple[str, ...], said: str, capsys: Capture) -> None:
    assert main(["explain", "--shape", "tiny", "--device", "emulated", "--max-len", "64", *flags]) == 0
    assert f"\nspeculation: {said}\n" in capsys.readouterr().out


def test_warnings_of_the_plan_reach_the_user(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_USE_BREAKABLE_CUDA_GRAPH", "1")
    argv = ["--shape", "tiny", "--device", "emulated", "--max-seqs", "1", "--max-len", "32"]
    argv += ["--disable-cuda-graph", "--cuda-graph-mode", '{"decode": "full"}', "--eager-copies"]
    said = (
        "SGLANG_USE_BREAKABLE_CUDA_GRAPH is not read, and changes nothing; use --graph-backend breakable",
        "decode.backend=full (asked by --cuda-graph-mode) overrides graphs=off (asked by --disable-cuda-graph)",
    )
    assert main(["explain", *argv]) == 0
    explained = capsys.readouterr().out
    assert "decode.backend   full" in explained
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    llm = arguments_from(parser.parse_args(argv)).open()
    assert llm.options.eager_copies
    for sentence in said:
        assert sentence in explained
        assert sentence in caplog.text


def test_profiles_of_the_capture_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    argv = ["--shape", "tiny", "--device", "emulated", "--max-seqs", "1", "--max-len", "32", "--max-step-tokens", "8"]
    arguments_from(parser.parse_args([*argv, "--enable-profile-cuda-graph"])).open()
    names = {file.name for file in (tmp_path / "phonograph-profile").iterdir()}
    assert {f"{phase}-{what}.json" for phase in ("decode", "prefill") for what in ("capture", "warm-up")} <= names
    assert "--enable-profile-cuda-graph is deprecated; use --graph-profile phonograph-profile" in caplog.text
    assert "phonograph-profile/decode-capture.json" in caplog.text


@pytest.mark.parametrize("flags", [(), ("--log-prompts",)])
def test_reproducers_have_token_ids_only_where_prompts_are_logged(tmp_path: Path, flags: tuple[str, ...]) -> None:
    checked = ["--shape", "tiny", "--shadow-verify", "0.5", "--shadow-dir", str(tmp_path)]
    options = arguments_from(command_line().parse_args(["serve", *checked, *flags])).options
    assert options.shadow_tokens == bool(flags)
    shadowing = shadowing_for(options)
    assert shadowing is not None
    assert (shadowing.share, shadowing.folder, shadowing.with_tokens) == (0.5, tmp_path, bool(flags))


def test_a_command_that_logs_no_prompts_keeps_no_token_ids() -> None:
    checked = ["--shape", "tiny", "--shadow-verify", "0.5", "--shadow-dir", "kept"]
    asked = command_line().parse_args(["generate", "--prompt", "One, two,", *checked])
    assert not arguments_from(asked).options.shadow_tokens


def test_explain_names_a_model_that_is_not_there(capsys: Capture) -> None:
    assert main(["explain", "--model", "/nowhere"]) != 0
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", json.dumps({**tiny.CONFIG, "logit_scale": 0.5}), "logit_scale is 0.5"),
        ("config.json", json.dumps({**tiny.CONFIG, "num_hidden_layers": 2**31}), "num_layers is 2147483648"),
        ("config.json", json.dumps({**tiny.CONFIG, "mlp_bias": True}), "missing"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token is 3"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_explain_refuses_what_generate_refuses(
    tmp_path: Path, capsys: Capture, file: str, text: str, said: str
) -> None:
    folder = tiny.write(tmp_path / "tiny")
    assert main(["explain", "--model", str(folder), "--device", "cpu"]) == 0
    assert "sampling: neutral where a request leaves a value out" in capsys.readouterr().out
    (folder / file).write_text(text)
    for command in (["explain"], ["generate", "--chat", "--prompt", "x"]):
        assert main([*command, "--model", str(folder), "--device", "cpu"]) == 2
        assert said in capsys.readouterr().err


def test_explain_takes_a_folder_that_has_its_configuration_alone(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    explain = ["explain", "--model", str(folder), "--device", "cpu"]
    assert main(explain) == 0
    assert "files: weights not there yet; nothing in config.json speaks against" in capsys.readouterr().out
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert main(explain) == 0
    out = capsys.readouterr().out
    assert "model: native: LlamaForCausalLM" in out
    assert "files: weights and tokenizer.json not there yet" in out
    names = {"model.layers.0.mlp.up_proj.weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert main(explain) == 0, "an index of files that are not there yet"
    capsys.readouterr()
    for refused in ([*explain, "--trace"], ["generate", "--model", str(folder), "--device", "cpu", "--prompt", "x"]):
        assert main(refused) == 2
        assert "model-00001-of-00001.safetensors is missing" in capsys.readouterr().err
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert main(explain) == 2
    assert "found pytorch_model.bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        ({"model_type": "phi", "architectures": ["PhiForCausalLM"]}, 0, "hf: PhiForCausalLM of transformers"),
        ({"model_type": "falcon", "architectures": ["FalconForCausalLM"]}, 2, "its attention can't be chosen"),
        ({"model_type": "phi", "quantization_config": {"quant_method": "awq"}}, 2, "its weights are stored as awq"),
    ],
)
def test_explain_judges_the_adapter_by_the_configuration_alone(
    tmp_path: Path, capsys: Capture, config: dict[str, object], status: int, said: str
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["explain", "--model", str(tmp_path), "--device", "cpu"]) == status
    assert said in "".join(capsys.readouterr())


def test_a_folder_without_weights_gives_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    checkpoint = open_checkpoint(tmp_path, needs_weights=False)
    precision = precision_for(checkpoint, EngineOptions(), torch.device("cuda"))
    assert "by config.json" in precision.reason
    with pytest.raises(CheckpointError, match="found no weights"):
        next(iter(checkpoint.tensors()))


def test_biases_in_all_projections_are_served(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write(tmp_path / "tiny")
    config = {**tiny.CONFIG, "attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = RandomCheckpoint(config_from_hf(config)).tensors()
    save_file({name: tensor.float() for name, tensor in tensors}, folder / "model.safetensors")
    for command in (["explain"], ["generate", "--prompt", "x", "--max-tokens", "2"]):
        assert main([*command, "--model", str(folder), "--device", "cpu"]) == 0
    assert "not supported" not in capsys.readouterr().err


def typing(*lines: str) -> Callable[[str], str]:
    """Lines that are typed one after the other, and then the end of the input."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    return read


def test_chat_ends_with_its_input(default: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", typing("What is the capital of France?", ""))
    assert main(["chat", "--device", "cpu", "--max-len", "512"]) == 0
    assert "The capital of France is Paris." in capsys.readouterr().out


def test_a_full_context_forgets_the_oldest_question(
    default: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("Count: " + "one, two, " * 12, "What is the capital of France?", "long " * 100, "Hello!", "")
    monkeypatch.setattr("builtins.input", typing(*lines))
    assert main(["chat", "--device", "cpu", "--max-len", "96", "--max-tokens", "12"]) == 0
    found = capsys.readouterr()
    assert "The capital of France is Paris." in found.out
    assert "the oldest question is dropped" in found.err
    assert "Shorten the prompt" in found.err, "a question that is too long alone is refused, and the talk goes on"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "--prompt", "x", "--model", "/nowhere"], "does not exist"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "temperature"),
        (["generate", "--prompt", "x", "--device", "cpu", "--attention", "triton"], "needs a GPU, and this is a CPU"),
        (["explain", "--shape", "tiny", "--device", "cpu", "--attention", "flashinfer"], "needs a GPU"),
        (["generate", "--prompt", "x", "--shape", "tiny", "--max-len", "100000"], "more than the model's context"),
        (["generate", "--prompt", "x", "--shape", "gpt-9"], "known: qwen3-8b"),
        (["generate", "--prompt", "x", "--device", "cuba"], "did you mean 'cuda'"),
        (["explain", "--device", "emulated", "--decode-graph-backend", "ful"], "did you mean 'full'"),
        (["explain", "--device", "emulated", "--graphs", "off", "--decode-graph-backend", "full"], "graphs-off"),
    ],
)
def test_bad_input_says_what_to_do(argv: list[str], says: str, capsys: Capture) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["explain", "--shape", "tiny", "--device", "cpu"], ["doctor"]])
def test_a_reader_that_goes_away_is_no_error(command: list[str], unbuffered: str) -> None:
    """Whether it is noticed by a print, or at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    argv, env = [sys.executable, "-m", "phonograph", *command], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(argv, stdout=writer, stderr=subprocess.PIPE, env=env) as run:
        os.close(writer)
        _, said = run.communicate()
    assert (run.returncode, said) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        (["--help"], ""),
        (["explain", "--shape", "tiny", "--device", "cpu"], ""),
        (["explain", "--shape", "tiny", "--device", "cpu"], "1"),
    ],
)
def test_output_that_a_full_disk_does_not_take_is_an_error(command: list[str], unbuffered: str) -> None:
    """Whether it is noticed by a print, or at the end."""
    argv, env = [sys.executable, "-m", "phonograph", *command], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        run = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert (run.returncode, run.stderr) == (2, f"phonograph: writing the output: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.parametrize("error", [BrokenPipeError("a process that died"), OSError(errno.ENOSPC, "another disk")])
def test_what_is_wrong_with_another_file_is_an_error_of_its_own(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(args: object) -> int:
        raise error

    monkeypatch.setattr(explain, "run", broken)
    with pytest.raises(type(error)) as raised:
        main(["explain", "--shape", "tiny", "--device", "cpu"])
    assert raised.value is error


def test_explain_says_where_steps_are_larger_than_asked_for(capsys: Capture) -> None:
    flags = ["explain", "--shape", "tiny", "--device", "cpu", "--max-seqs", "4", "--speculate", "ngram"]
    for asked, said in (
        ("8", "16 tokens a step (not 8: 4 of each sequence that decodes)\n"),
        ("16", "16 tokens a step\n"),
    ):
        assert main([*flags, "--max-step-tokens", asked]) == 0
        assert said in capsys.readouterr().out


HELP_OF_ALL = """
import argparse, contextlib, io, sys
from phonograph.cli.main import command_line, main

def commands(parser, path=()):
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*path, name))

found = list(commands(command_line()))
for path in found:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*path, "--help"])
    assert out.getvalue().startswith("usage: phonograph " + " ".join(path)), path
slow = sorted({"torch", "numpy", "msgspec", "starlette"} & set(sys.modules))
print(len(found), *slow)
"""


def test_help_of_every_command_comes_without_torch() -> None:
    told = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=True).stdout
    number, *slow = told.split()
    assert int(number) >= 17, "the commands of bench are not among them"
    assert slow == []
