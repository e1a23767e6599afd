"""accelerate: what users do with `generate`, each right, and replayed or counted with a reason."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")
import transformers

from hugging_face import DECODERS, ENCODERS, VOCAB, linear_of, made, prompt
from phonograph import DeclarationError
from phonograph.hf import Accelerated, accelerate

pytestmark = pytest.mark.slow

MEANT = (
    "the first step of a kind is taken to see whether the second is like it",
    "what is recorded is compared with a step that is not",
)
"""Why a few steps are eager before any is a replay."""
LENGTH = 128
"""Of every cache here: the positions that the models have."""


def plain_cache(model: Any, max_len: int = LENGTH) -> Any:
    return transformers.StaticCache(model.config, max_len)


class Both:
    """A model that is accelerated, and one of the same weights that is not."""

    def __init__(self, name: str = "llama") -> None:
        self.model, self.plain = made(DECODERS[name]), made(DECODERS[name])
        for model in (self.model, self.plain):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        self.fast = accelerate(self.model)

    def generate(self, ids: torch.Tensor, *, static: bool = True, **options: Any) -> tuple[Any, Any]:
        """What both give; the plain one over a static cache too, or over the one that it makes itself."""
        given = {"max_new_tokens": 6, "do_sample": False} | options
        torch.manual_seed(0)
        found = self.model.generate(ids, **given)
        torch.manual_seed(0)
        cache: Any = {"past_key_values": plain_cache(self.plain)} if static else {}
        return found, self.plain.generate(ids, **given, **cache)

    @property
    def num_steps(self) -> int:
        """Steps that were replays, and those that have a reason."""
        said = re.search(r"decode steps: (\d+) replays, (\d+) eager", self.fast.explain())
        assert said is not None
        return int(said[1]) + int(said[2])

    def check(self, ids: torch.Tensor, *, static: bool = True, replays: int | None = None, **options: Any) -> None:
        before, steps, served = self.fast.replays, self.num_steps, self.fast.generations
        found, wanted = self.generate(ids, static=static, **options)
        assert torch.equal(found, wanted), self.fast.explain()
        if self.fast.generations > served:  # then every step is counted
            assert self.num_steps - steps == found.shape[1] - ids.shape[1] - 1, self.fast.explain()
        if replays is not None:
            assert self.fast.replays - before == replays, self.fast.explain()


@pytest.fixture
def both() -> Both:
    return Both()


# -- what is replayed ---------------------------------------------------------------------------------------------


def test_a_second_generation_is_replays_only(both: Both) -> None:
    both.check(prompt(1, 4), replays=3)  # of five steps; two show what they are like
    both.check(prompt(1, 4, seed=1), replays=5)
    assert both.fast.generations == 2
    assert not both.fast.declined
    assert "8 replays, 2 eager" in both.fast.explain()


def test_batch_sizes_and_lengths_come_and_go(both: Both) -> None:
    for num_seqs in (1, 2, 3):
        both.check(prompt(num_seqs, 4), replays=3)
    for num_seqs, length, count in ((2, 9, 6), (1, 1, 9), (3, 2, 1), (2, 30, 6)):
        both.check(prompt(num_seqs, length, seed=length), max_new_tokens=count, replays=count - 1)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 8},
        {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"eos_token_id": list(range(3, 30)), "max_new_tokens": 20},
        {"bad_words_ids": [[5], [6, 7]], "min_new_tokens": 3},
        {"prefill_chunk_size": 2},
        {"guidance_scale": 1.5},
        {"cache_implementation": "static", "static": False},
        {"disable_compile": True},
        {"max_new_tokens": 1},
        {"max_time": 100.0},
        {"stop_strings": None, "token_healing": False},
    ],
    ids=str,
)
def test_options_of_generate(both: Both, options: dict[str, Any]) -> None:
    for seed in range(2):
        both.check(prompt(2, 5, seed), **options)
    assert not both.fast.declined
    assert set(both.fast.eager_steps) <= {reason for reason in both.fast.eager_steps if reason in MEANT}


def test_padded_prompts(both: Both) -> None:
    for zeros in ([2, 0], [0, 3], [0, 0], [1, 1]):
        mask = (torch.arange(6) >= torch.tensor(zeros)[:, None]).long()
        both.check(prompt(2, 6), attention_mask=mask)
    assert both.fast.replays >= 4 * 5 - 4  # recorded with a mask, and in newer versions without too


def test_a_processor_and_a_criterion_of_the_caller(both: Both) -> None:
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(int(ids[0, -1]) % 5, -1)

    def criterion(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 8)

    both.check(prompt(2, 4), logits_processor=[processor], stopping_criteria=[criterion], replays=1)


def test_embeddings_as_a_prompt(both: Both) -> None:
    embedded = both.model.get_input_embeddings()(prompt(2, 5))
    found = both.model.generate(inputs_embeds=embedded, max_new_tokens=6)
    wanted = both.plain.generate(inputs_embeds=embedded, max_new_tokens=6, past_key_values=plain_cache(both.plain))
    assert torch.equal(found, wanted)
    assert both.fast.replays == 3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_everything_that_can_be_returned(name: str) -> None:
    """Scores, logits and hidden states of every step; and they stay what they are."""
    both = Both(name)
    asked = ["output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate"]
    options = dict.fromkeys(asked, True)
    first, wanted = both.generate(prompt(2, 5), **options)
    both.generate(prompt(2, 5, seed=1), **options)
    assert both.fast.replays == 8
    assert type(first) is type(wanted)
    for key in ("scores", "logits", "hidden_states"):
        found, right = (tree_leaves(one[key]) for one in (first, wanted))
        assert len(found) == len(right) >= 6
        assert all(map(torch.equal, found, right)), key


# -- what is not, with a reason -----------------------------------------------------------------------------------

DECLINED: dict[str, dict[str, Any]] = {
    "beam_search": {"num_beams": 3},
    "assisted_generation": {"prompt_lookup_num_tokens": 2},
    "use_cache": {"use_cache": False},
    "cache_implementation='dynamic'": {"cache_implementation": "dynamic"},
    "custom_generate": {"custom_generate": transformers.GenerationMixin._sample},
    "takes the place of max_new_tokens": {"stopping_criteria": [transformers.MaxLengthCriteria(9)]},
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_is_declined_runs_as_it_did(both: Both, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        both.check(prompt(1, 6), static=False, replays=0, **DECLINED[reason])
    assert [count for said, count in both.fast.declined.items() if reason in said] == [2]
    assert len([record for record in caplog.records if reason in record.message]) == 1
    assert reason in both.fast.explain()
    both.check(prompt(1, 6), replays=3)


def test_an_assistant_that_is_accelerated_too(both: Both) -> None:
    drafting = Both()
    found = both.model.generate(prompt(1, 5), assistant_model=drafting.model, max_new_tokens=8, do_sample=False)
    wanted = both.plain.generate(prompt(1, 5), assistant_model=drafting.plain, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, wanted)
    assert both.fast.declined.total() == 1
    assert drafting.fast.replays == 0


def test_a_cache_of_the_caller(both: Both) -> None:
    for make in (plain_cache, lambda model: transformers.DynamicCache(config=model.config)):
        found, wanted = (
            model.generate(prompt(1, 5), past_key_values=make(model), max_new_tokens=5)
            for model in (both.model, both.plain)
        )
        assert torch.equal(found, wanted)
    assert both.fast.declined == {"past_key_values is a cache of the caller": 2}


def test_an_encoder_decoder() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    wanted = model.generate(prompt(2, 5), max_new_tokens=5)
    fast = accelerate(model)
    assert torch.equal(model.generate(prompt(2, 5), max_new_tokens=5), wanted)
    assert fast.declined == {"an encoder-decoder keeps a second cache": 1}


def test_no_cache_is_longer_than_max_len() -> None:
    model = made(DECODERS["llama"])
    with accelerate(model, max_len=20) as fast:
        for num_tokens in (10, 17, 18):
            model.generate(prompt(1, 4), max_new_tokens=num_tokens, eos_token_id=None)
        assert fast.declined == {"a cache for 21 tokens is needed, max_len is 20": 1}
        assert "cache of 1 × 20 tokens" in fast.explain()


def test_the_cache_used_longest_ago_goes_first() -> None:
    model = made(DECODERS["llama"])
    with accelerate(model, max_caches=2) as fast:
        for num_seqs in (1, 2, 1, 3):
            model.generate(prompt(num_seqs, 4), max_new_tokens=4, eos_token_id=None)
        said = fast.explain()
        assert "cache of 1 ×" in said
        assert "cache of 3 ×" in said
        assert "cache of 2 ×" not in said


# -- what changes between calls -----------------------------------------------------------------------------------


def weight_replaced(model: Any) -> None:
    linear_of(model).weight = torch.nn.Parameter(linear_of(model).weight * 1.5)


def memory_replaced(model: Any) -> None:
    """Under the last parameters, which calls look at in turns."""
    for parameter in [*model.parameters()][-3:]:
        parameter.data = parameter.data * 1.5


def weight_written(model: Any) -> None:
    with torch.no_grad():
        linear_of(model).weight.mul_(1.5)


def weights_loaded(model: Any) -> None:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def adapter_added(model: Any) -> None:
    """As LoRA does: a module in the place of a matrix, with the matrix in it."""

    class Adapted(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.scale = base, torch.nn.Parameter(torch.full((), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * (1 + self.scale)

    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def hooked(model: Any) -> None:
    linear_of(model).register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def another_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def another_dtype(model: Any) -> None:
    model.double()


def vocabulary_resized(model: Any) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(VOCAB + 8)


def another_scale(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


CHANGES: list[Callable[[Any], None]] = [
    weight_written, weights_loaded, weight_replaced, memory_replaced, adapter_added, hooked, another_attention,
    another_dtype, vocabulary_resized, another_scale,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_change_between_generations_is_followed(both: Both, change: Callable[[Any], None]) -> None:
    """It is recorded again where the old recording does not do, without being asked."""
    both.check(prompt(2, 4), replays=3)
    for model in (both.model, both.plain):
        change(model)
    both.check(prompt(2, 4))
    both.check(prompt(2, 4, seed=1), replays=5)


@pytest.mark.parametrize("change", [weight_replaced, hooked, another_scale], ids=lambda one: one.__name__)
def test_a_change_within_a_generation_is_followed(both: Both, change: Callable[[Any], None]) -> None:
    """A streamer, a criterion or a processor may do that."""
    both.check(prompt(1, 4))

    def changing(model: Any) -> Any:
        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] == 7:
                change(model)
            return scores

        return [processor]

    found = both.model.generate(prompt(1, 4), max_new_tokens=8, logits_processor=changing(both.model))
    cache = plain_cache(both.plain)
    options: Any = {"logits_processor": changing(both.plain), "past_key_values": cache}
    assert torch.equal(found, both.plain.generate(prompt(1, 4), max_new_tokens=8, **options))


def test_training_mode_is_declined_and_evaluation_served_again(both: Both) -> None:
    both.check(prompt(1, 4), replays=3)
    both.model.train()
    both.plain.train()
    both.check(prompt(1, 4), replays=0, static=False)
    both.model.eval()
    both.plain.eval()
    both.check(prompt(1, 4), replays=5)
    assert both.fast.declined == {"the model is in training mode. Call model.eval()": 1}


def test_modes_have_caches_of_their_own(both: Both) -> None:
    """Autocast has none: keys and values may be of two dtypes there, which transformers' static cache can't hold."""
    for _ in range(2):
        both.check(prompt(1, 4))
        with torch.inference_mode():
            both.check(prompt(1, 4))
        with torch.autocast("cpu", torch.float16):
            both.check(prompt(1, 4), static=False)
    assert both.fast.replays == 2 * (3 + 5)
    assert [*both.fast.declined.values()] == [2]


def test_a_capture_that_fails_harms_no_generation(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, say: the step that was to be recorded has been taken."""

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("phonograph.graphs.graphed.Graphed.capture", fail)
    both.check(prompt(2, 4), replays=0)
    both.check(prompt(2, 4), replays=0, static=False)
    assert [*both.fast.declined] == ["no recording is possible: OutOfMemoryError: no memory left"]


# -- models that do more than others ------------------------------------------------------------------------------


class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Counts calls in Python."""

    def forward(self, *, input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        self.num_calls = getattr(self, "num_calls", 0) + 1
        outputs.logits = outputs.logits * (-1) ** self.num_calls
        return outputs


class Remembering(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Has a tensor of its own that every call writes."""

    def forward(self, *, input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        if not hasattr(self, "calls"):
            self.calls = torch.zeros(1)
        self.calls.add_(1)
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        outputs.logits = outputs.logits * self.calls.sin()
        return outputs


class Drawing(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Draws random numbers."""

    def forward(self, *, input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        outputs.logits = outputs.logits + torch.rand_like(outputs.logits)
        return outputs


class Writing(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Writes to all of the cache."""

    def forward(self, *, input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        past_key_values.layers[0].keys.mul_(1.01)
        return outputs


class Replacing(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Replaces the memory of the cache."""

    def forward(self, *, input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        past_key_values.layers[0].keys = past_key_values.layers[0].keys * 1.01
        return outputs


class Branching(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Does something else at some lengths."""

    def forward(self, *, input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        if past_key_values.get_seq_length() % 3 == 0:
            outputs.logits = -outputs.logits
        return outputs


class Preparing(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Prepares its inputs in a way of its own."""

    def prepare_inputs_for_generation(
        self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **inputs: Any
    ) -> Any:
        prepared = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **inputs
        )
        prepared["position_ids"] = prepared["position_ids"] + input_ids.shape[1] % 3
        return prepared


@pytest.mark.parametrize(
    ("kind", "is_recorded"),
    [(Counting, False), (Remembering, True), (Drawing, True), (Writing, True), (Replacing, False), (Branching, False),
     (Preparing, True)],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
def test_what_a_model_does_besides_is_done_once_a_step(both: Both, kind: Any, is_recorded: bool) -> None:
    for model in (both.model, both.plain):
        model.__class__ = kind
    both.fast.undo()
    both.fast = accelerate(both.model)
    for seed in range(3):
        declined = both.fast.declined.total()
        found, _ = both.generate(prompt(2, 4, seed), max_new_tokens=9)
        is_served = both.fast.declined.total() == declined
        for model in (both.model, both.plain):
            vars(model).pop("calls", None), vars(model).pop("num_calls", None)
        _, wanted = both.generate(prompt(2, 4, seed), max_new_tokens=9, static=is_served)
        for model in (both.model, both.plain):
            vars(model).pop("calls", None), vars(model).pop("num_calls", None)
        assert torch.equal(found, wanted), both.fast.explain()
    assert bool(both.fast.replays) == is_recorded, both.fast.explain()


# -- undoing, copying ---------------------------------------------------------------------------------------------


def test_undo_leaves_the_model_as_it_was() -> None:
    model = made(DECODERS["gemma3"])
    before, config = dict(vars(model)), model.config.to_dict()
    with accelerate(model) as fast:
        assert model.generate is not before.get("generate")
        model.generate(prompt(1, 4), max_new_tokens=6, eos_token_id=None)
        assert fast.replays
    assert vars(model) == before
    assert model.config.to_dict() == config
    fast.undo()
    assert vars(model) == before
    model.generate(prompt(1, 4), max_new_tokens=6)
    assert fast.generations == 1


def test_undo_leaves_what_the_caller_had_replaced() -> None:
    model = made(DECODERS["llama"])
    calls = []

    def generate(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    model.generate = generate
    with accelerate(model) as fast:
        model.generate(prompt(1, 4), max_new_tokens=6, eos_token_id=None)
        assert fast.replays == 3
    assert len(calls) == 1
    assert model.generate is generate


def test_inputs_that_the_caller_prepares(both: Both) -> None:
    """A method of the model that was replaced before is asked, and steps are replays all the same."""
    for model in (both.model, both.plain):
        accelerate(model).undo()
        own = model.prepare_inputs_for_generation

        def shifted(
            ids: Any, own: Any = own, attention_mask: Any = None, past_key_values: Any = None, **kw: Any
        ) -> Any:
            prepared = own(ids, attention_mask=attention_mask, past_key_values=past_key_values, **kw)
            return prepared | {"position_ids": prepared["position_ids"] + 1}

        model.prepare_inputs_for_generation = shifted
    both.fast = accelerate(both.model)
    both.check(prompt(2, 4), replays=3)
    both.check(prompt(2, 4, seed=1), replays=5)


def test_a_model_has_one_handle() -> None:
    model = made(DECODERS["llama"])
    fast = accelerate(model)
    assert accelerate(model) is fast
    with pytest.raises(DeclarationError, match="Call undo"):
        accelerate(model, max_len=100)
    fast.undo()
    assert accelerate(model, max_len=100) is not fast


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_graphs_of_its_own(both: Both, how: str) -> None:
    both.check(prompt(1, 4))
    if how == "deepcopy":
        copied = copy.deepcopy(both.model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(both.model))
    else:
        torch.save(both.model, file := io.BytesIO())
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    handle = accelerate(copied)
    assert isinstance(handle, Accelerated)
    assert handle is not both.fast
    with torch.no_grad():
        linear_of(copied).weight.mul_(2)
        linear_of(both.plain).weight.mul_(2)
    found = copied.generate(prompt(1, 4), max_new_tokens=6, do_sample=False)
    wanted = both.plain.generate(prompt(1, 4), max_new_tokens=6, past_key_values=plain_cache(both.plain))
    assert torch.equal(found, wanted)
    assert handle.replays == 3
    handle.undo()
    assert "generate" not in vars(copied)
    assert "generate" in vars(both.model)


# -- several at once ----------------------------------------------------------------------------------------------


def test_a_generation_within_a_generation(both: Both) -> None:
    inner: list[torch.Tensor] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] in (5, 8):
            inner.append(both.model.generate(prompt(1, 3), max_new_tokens=5, do_sample=False))
        return scores

    found = both.model.generate(prompt(1, 4), max_new_tokens=8, logits_processor=[processor])
    assert torch.equal(
        found, both.plain.generate(prompt(1, 4), max_new_tokens=8, past_key_values=plain_cache(both.plain))
    )
    wanted = both.plain.generate(prompt(1, 3), max_new_tokens=5)
    assert all(torch.equal(one, wanted) for one in inner)
    assert both.fast.declined == {"another generate of this model is under way": 2}


def test_threads(both: Both) -> None:
    prompts = [prompt(1, 4, seed) for seed in range(6)]
    wanted = [both.plain.generate(ids, max_new_tokens=8, do_sample=False) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        found[index] = both.model.generate(prompts[index], max_new_tokens=8, do_sample=False)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], wanted[index]) for index in range(6))
    assert both.fast.generations + both.fast.declined.total() == 6


def test_a_generation_that_is_broken_off(both: Both) -> None:
    class Broken(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.count = 0

        def put(self, value: Any) -> None:
            self.count += 1
            if self.count > 4:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            both.model.generate(prompt(1, 7), max_new_tokens=8, streamer=Broken())
        both.check(prompt(1, 4))


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(2, 2), "meta-llama/Llama-3.1-8B"])
def test_only_models_that_generate(wrong: Any) -> None:
    with pytest.raises(DeclarationError, match="is not a transformers model with generate"):
        accelerate(wrong)


def test_an_encoder_has_nothing_to_generate() -> None:
    with pytest.raises(DeclarationError, match="graphed"):
        accelerate(made(ENCODERS["bert"]))


@pytest.mark.parametrize("options", [{"max_len": 0}, {"max_len": 1.5}, {"max_caches": 0}, {"max_caches": True}])
def test_limits_are_whole_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match="expected a whole number from 1 on"):
        accelerate(made(DECODERS["llama"]), **options)


def test_without_transformers_the_remedy_is_said() -> None:
    code = "import sys; sys.modules['transformers'] = None; import phonograph.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'phonograph[hf]'" in done.stderr
