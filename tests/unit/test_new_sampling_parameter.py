"""A sampling parameter that only this test has: no token below `lowest_id` is drawn.

Files of the package that it touches: none. As part of the package it would touch three: its column in
engine/state/columns.py, the sampler that reads it (engine/sampling/sampler.py), and its field in
engine/requests/request.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec
import pytest
import torch

from phonograph import LLM, Device, EngineOptions, RequestError, SamplingParams, open_device, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.process.messages import Add, ToCore
from phonograph.engine.requests.parameter import Sampling, SamplingParameter
from phonograph.engine.requests.request import GrammarSpec, Request
from phonograph.engine.sampling.sampler import SamplingRows, TorchSampler
from phonograph.engine.state.column import Column, RowSource
from phonograph.graphs.planning.settings import ask


@dataclass(frozen=True)
class Params(SamplingParams):
    lowest_id: int = 0


def lowest_id(entry: RowSource) -> int:
    return entry.params.lowest_id if isinstance(entry.params, Params) else 0


@dataclass(frozen=True)
class Rows(SamplingRows):
    lowest_id: torch.Tensor


class LowestIdSampler(TorchSampler):
    columns = (
        *TorchSampler.columns,
        Column(
            "lowest_id",
            torch.int32,
            value=lowest_id,
            trial=lambda trial: trial.whole(0, 9),
            parameter=SamplingParameter("lowest_id", Sampling.TRUNCATED, off=0, of=Params),
        ),
    )
    rows = Rows

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        if isinstance(rows, Rows):
            ids = torch.arange(logits.shape[1], device=logits.device)
            logits = torch.where(ids < rows.lowest_id[:, None], float("-inf"), logits)
        return super().pick(logits, rows, level)


def make(device: Device, backend: str) -> LLM:
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    options = EngineOptions(max_seqs=3, max_len=96, max_tokens=32, page_size=8, dtype=torch.float32)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=options, asked=asked)


def test_a_new_parameter_is_a_column_a_sampler_and_a_field(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, found = [[5, 9], [7] * 12, [3]], {}
    monkeypatch.setattr("phonograph.engine.llm.select_sampler", lambda *_: LowestIdSampler())
    for backend in ("disabled", "full"):
        llm = make(device, backend)
        asked = [
            Params(max_tokens=12, temperature=1.5, top_k=top_k, seed=2, ignore_eos=True, lowest_id=lowest)
            for lowest, top_k in ((0, 0), (200, 0), (250, 4))
        ]
        alone = [llm.generate([prompt], one)[0].tokens for prompt, one in zip(prompts, asked, strict=True)]
        readers: dict[Any, Any] = {}
        for prompt, one in zip(prompts, asked, strict=True):
            readers |= llm._submit([tuple(prompt)], one)
        for _ in llm._run(readers):
            pass
        assert [reader.done.tokens for reader in readers.values()] == alone
        assert [min(tokens) >= one.lowest_id for tokens, one in zip(alone, asked, strict=True)] == [True] * 3
        assert min(alone[0]) < 200
        plain = llm.generate([prompts[1]], SamplingParams(max_tokens=12, temperature=1.5, seed=2, ignore_eos=True))
        assert min(plain[0].tokens) < 200  # whoever has the row next does not have its parameter
        if backend == "full":
            assert llm.executor.runners["decode"].stats.eager.total() == 0
            assert verify(llm.executor.runners["decode"], batches=1).ok
        (greedy,) = llm.generate([prompts[1]], Params(max_tokens=6, temperature=0.0, ignore_eos=True, lowest_id=240))
        assert min(greedy.tokens) >= 240, "greedy too: the column says which recordings apply it"
        found[backend] = alone, greedy.tokens
    assert found["disabled"] == found["full"]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_sampler_that_does_not_honour_it_lets_no_request_set_it(device: str) -> None:
    llm = make(open_device(device), "disabled")
    with pytest.raises(RequestError, match="lowest_id is 200, and this engine's sampler does not honour it") as found:
        llm.generate([[5, 9]], Params(max_tokens=2, lowest_id=200))
    assert found.value.field == "lowest_id"
    assert len(llm.generate([[5, 9]], Params(max_tokens=2, ignore_eos=True))[0].tokens) == 2, "it sets nothing"


@dataclass(frozen=True)
class Grammar(GrammarSpec):
    lowest_id: int = 0


class Renamed(SamplingParams):
    """Without a field of its own."""


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (Params(lowest_id=5), "lowest_id"),
        (Params(), "lowest_id"),
        (Renamed(), "params"),
        (SamplingParams(grammar=Grammar("regex", "a", lowest_id=5)), "lowest_id"),
    ],
)
def test_the_channel_to_the_core_takes_no_further_fields(params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError, match=r"knows (SamplingParams|GrammarSpec) alone") as found:
        Add(Request("one", (1,), params))
    assert found.value.field == field


def test_the_channel_to_the_core_takes_every_field() -> None:
    given = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={7: 2.0},
        seed=9,
        stop=("x",),
        stop_token_ids=(8,),
        ignore_eos=True,
        n=2,
        logprobs=3,
        grammar=GrammarSpec("regex", "a", "guided_regex"),
        prompt_logprobs=2,
        min_tokens=1,
        allowed_token_ids=(5, 6),
        bad_words=("y",),
        bad_token_ids=((1,), (2, 3)),
        speculate=2,
        return_hidden_states="last",
    )
    neutral = SamplingParams()
    assert [one.name for one in fields(given) if getattr(given, one.name) == getattr(neutral, one.name)] == []
    request = Request("one", (1, 2), given, priority=3, deadline=4.0, arrival=5.0)
    (arrived,) = msgspec.msgpack.decode(msgspec.msgpack.encode([Add(request)]), type=list[ToCore])
    assert arrived == Add(request)
