"""The default model in our engine against `transformers` on the same weights, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from engine_logits import sequence_logits
from sampler import Case, probabilities

from phonograph import CheckpointError
from phonograph.engine.checkpoints import default_model
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams

pytest.importorskip("transformers")
from reference import reference_model

pytestmark = pytest.mark.slow

TOPICS = ["the sea", "a clock", "winter", "bread", "a lost key", "the moon", "trains", "a garden", "music", "rain"]
FORMS = [
    "Write one sentence about {}.",
    "What is {}?",
    "Once upon a time there was {}",
    "List three facts about {}:\n1.",
    "def about(topic='{}'):\n",
]
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]
MARGIN = 1e-3


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    return LLM(device="cpu", options=EngineOptions(max_seqs=16, max_len=512, dtype=torch.float32))


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Any:
    return reference_model(llm.checkpoint)


def test_logits_equal(llm: LLM, reference: Any) -> None:
    prompt = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog, and then")  # type: ignore[union-attr]
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0]
    for as_decodes in (False, True):
        found = sequence_logits(llm, prompt, as_decodes=as_decodes)
        assert (found - wanted).abs().max().item() <= 1e-3


def test_greedy_tokens_are_identical_wherever_the_margin_allows(llm: LLM, reference: Any) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    compared = 0
    for done in llm.generate(PROMPTS, params):
        ids = torch.tensor([[*done.prompt, *done.tokens]])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(done.prompt) - 1 : -1]
        top = logits.topk(2, -1).values
        sure = (top[:, 0] - top[:, 1]) > MARGIN
        assert torch.equal(logits.argmax(-1)[sure], torch.tensor(done.tokens)[sure]), done.text
        compared += int(sure.sum())
    assert compared > 0.95 * 16 * len(PROMPTS)


def mixed(x: Any) -> Any:
    """The rule's hash, in unsigned numbers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def noise_by_hand(seed: int, position: int, vocab: int) -> Any:
    """The rule's noise (docs/decisions/0024), in Python's whole numbers and float64."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    low = mixed(low ^ mixed((high + 0x9E3779B9) & 0xFFFFFFFF))
    high = mixed(high ^ mixed((low + 0x7F4A7C15) & 0xFFFFFFFF))
    first = mixed((low + position * 0x9E3779B9) & 0xFFFFFFFF)
    tokens = np.arange(vocab, dtype=np.uint64) * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
    hashed = mixed((mixed(tokens ^ np.uint64(first)) + np.uint64(mixed(high ^ first))) & np.uint64(0xFFFFFFFF))
    return -np.log(-np.log((hashed.astype(np.longdouble) + 0.5) / 2**32)).astype(np.float64)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.01},
        {"temperature": 0.7},
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_sampled_tokens_are_those_of_the_rule_in_float64(llm: LLM, reference: Any, asked: dict[str, Any]) -> None:
    """Of the scores by hand, on the logits of `transformers`, the highest is the token that was drawn."""
    case, compared = Case(**asked), 0
    for seed in (283, 2**63 - 1):
        params = SamplingParams(max_tokens=12, seed=seed, ignore_eos=True, **asked)
        for done in llm.generate(PROMPTS[:2], params):
            with torch.inference_mode():
                rows = reference(torch.tensor([[*done.prompt, *done.tokens]])).logits[0, len(done.prompt) - 1 : -1]
            for i, logits in enumerate(rows.double()):
                noise = torch.from_numpy(noise_by_hand(seed, len(done.prompt) + i, len(logits)))
                score = torch.where(probabilities(logits, case) > 0, logits / case.temperature + noise, -torch.inf)
                top = score.topk(2).values
                if top[0] - top[1] > MARGIN / case.temperature:
                    assert int(score.argmax()) == done.tokens[i], (seed, done.text)
                    compared += 1
    assert compared > 0.9 * 2 * 2 * 12


def test_the_answer_to_a_question(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=32, temperature=0.0)
    assert llm.chat(question, params).text == "The capital of France is Paris."
    assert "".join(llm.stream_chat(question, params)) == "The capital of France is Paris."


def test_a_stop_string_never_leaks(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    done = llm.chat(question, SamplingParams(max_tokens=32, temperature=0.0, stop=(" is Par",)))
    assert done.text == "The capital of France"
    llm.core.scheduler.integrity()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"type": "linear", "factor": 4},
        },
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": True, "head_dim": 16},
    ],
)
def test_logits_of_tiny_checkpoints_equal(tmp_path: Path, changes: dict[str, Any]) -> None:
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(tmp_path, device="cpu", options=EngineOptions(max_seqs=2, dtype=torch.float32))
    prompt = torch.randint(96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0]
    assert (sequence_logits(llm, prompt) - wanted).abs().max().item() <= 1e-3
