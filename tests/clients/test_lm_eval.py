"""lm-eval against a live server: its scores of choices and its generations are those of plain `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference import reference_model

from clients.conftest import MODEL
from clients.environment import PROGRAMS, client_python, run_client
from phonograph.engine.checkpoints import default_model, open_checkpoint
from phonograph.engine.text import Tokenizer
from phonograph.errors import CheckpointError
from server import tiny
from server.conftest import TINY_FLAGS, Server, serving

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

CONTEXT = 512


class Evaluated(NamedTuple):
    """A server, the name of its model, its tokenizer as a folder, and the model by plain `transformers`."""

    server: Server
    name: str
    folder: Path
    tokenizer: Tokenizer
    reference: Any


def tokenizer_folder(tokenizer: Tokenizer, folder: Path) -> Path:
    """As `AutoTokenizer` opens it, without the model."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    named = {role: token for role, token in tokenizer.special_tokens.items() if role in ("bos_token", "eos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    return folder


@pytest.fixture(scope="module", params=["tiny", "default"])
def evaluated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluated]:
    client_python("lm_eval", "transformers")
    folder = tmp_path_factory.mktemp("lm_eval")
    flags: tuple[str, ...]
    if request.param == "tiny":
        model = tiny.write(folder / "tiny")
        flags, name = ("--model", str(model), *TINY_FLAGS), "tiny"
    else:
        try:
            model = default_model()
        except CheckpointError as error:
            pytest.skip(str(error))
        flags, name = ("--device", "cpu", "--max-len", str(CONTEXT), "--dtype", "float32", "--port", "0"), MODEL
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    with serving(*flags) as server:
        reference = reference_model(checkpoint)
        yield Evaluated(server, name, tokenizer_folder(tokenizer, folder / "tokenizer"), tokenizer, reference)


def documents(name: str) -> list[dict[str, Any]]:
    lines = (PROGRAMS / "lm_eval_tasks" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def scored(on: Evaluated, context: str, ending: str) -> tuple[float, bool]:
    """How likely an ending is, and whether it is what greedy decoding gives."""
    before, whole = on.tokenizer.encode(context), on.tokenizer.encode(context + " " + ending)
    with torch.inference_mode():
        logprobs = on.reference(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    targets = torch.tensor(whole[len(before) :])
    rows = logprobs[len(before) - 1 : -1]
    return rows.gather(1, targets[:, None]).sum().item(), bool((rows.argmax(-1) == targets).all())


def generated(on: Evaluated, begin: str) -> str:
    """What greedy decoding gives, up to the end of a line or of a sentence."""
    tokens = on.tokenizer.encode(begin)
    with torch.inference_mode():
        whole = on.reference.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(on.tokenizer.eos_ids),
            pad_token_id=0,
        )[0].tolist()
    text = on.tokenizer.decode(whole, skip_special=True)[len(on.tokenizer.decode(tokens)) :]
    for end in ("\n", "."):
        text = text.partition(end)[0]
    return text


@pytest.mark.parametrize(("form", "batch"), [("ids", 1), ("ids", 4), ("texts", 1)])
def test_scores_are_those_of_transformers(evaluated: Evaluated, form: str, batch: int, tmp_path: Path) -> None:
    python = client_python("lm_eval", "transformers")
    said = run_client(
        python,
        *("lm_eval_scores.py", evaluated.server.url, evaluated.name, str(evaluated.folder), form, str(batch)),
        str(CONTEXT),
        seconds=400,
        HF_HOME=str(tmp_path),
    )
    found = json.loads(said.rstrip().rpartition("\n")[2])
    right, right_normed, choices = 0, 0, documents("endings")
    for document, resps in zip(choices, found["samples"]["phonograph_endings"], strict=True):
        wanted = [scored(evaluated, document["context"], ending) for ending in document["endings"]]
        for (logprob, is_greedy), ((given, said_greedy),) in zip(wanted, resps, strict=True):
            assert float(given) == pytest.approx(logprob, abs=2e-3)
            assert str(said_greedy) == str(is_greedy)
        best = max(range(len(wanted)), key=lambda place: wanted[place][0])
        normed = max(range(len(wanted)), key=lambda place: wanted[place][0] / len(document["endings"][place]))
        right, right_normed = right + (best == document["label"]), right_normed + (normed == document["label"])
    scores = found["results"]["phonograph_endings"]
    assert scores["acc"] == pytest.approx(right / len(choices))
    assert scores["acc_norm"] == pytest.approx(right_normed / len(choices))
    matched, texts = 0, documents("counting")
    for document, ((given,),) in zip(texts, found["samples"]["phonograph_counting"], strict=True):
        wanted_text = generated(evaluated, document["begin"])
        assert given == wanted_text
        matched += wanted_text.lower() == document["next"].lower()
    assert found["results"]["phonograph_counting"]["exact_match"] == pytest.approx(matched / len(texts))
