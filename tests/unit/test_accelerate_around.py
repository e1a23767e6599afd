"""accelerate, seen from outside: what callers get, what others put around it, and what goes past it; the wanted result
is always that of transformers without it."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from hugging_face import DECODERS, VOCAB, WINDOW, made, prompt
from phonograph.hf import Accelerated, accelerate

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
WINDOWED = "mistral, windowed"


def model_of(name: str = "llama") -> Any:
    model = made(DECODERS[name])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def both_do(act: Callable[[Any], Any], name: str = "llama", times: int = 2) -> tuple[Any, Any, Accelerated]:
    """What an accelerated model gives the last of some times, what one of the same weights that is not gives, and the
    handle."""
    model, plain = model_of(name), model_of(name)
    fast = accelerate(model)
    for _ in range(times):
        found, wanted = act(model), act(plain)
    return found, wanted, fast


def assert_same_caches(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert found.get_seq_length() == wanted.get_seq_length()
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        assert type(ours) is type(theirs)
        assert ours.get_seq_length() == theirs.get_seq_length()
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


# -- a cache that generate returns --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW + 2])
@pytest.mark.parametrize("name", ["llama", "gemma3", WINDOWED])
def test_a_returned_cache_is_the_kind_that_transformers_makes(name: str, length: int) -> None:
    """It grows beyond any cache of ours, and the next generation leaves it alone."""

    def act(model: Any) -> Any:
        first = model.generate(prompt(1, length), **GREEDY, return_dict_in_generate=True)
        model.generate(prompt(1, length, seed=1), **GREEDY)
        held = copy.deepcopy(first.past_key_values)
        ids = torch.cat([first.sequences, prompt(1, 3, seed=5)], 1)
        further = model.generate(
            ids, past_key_values=first.past_key_values, max_new_tokens=122, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        return held, further.sequences, further.past_key_values

    (held, tokens, after), (wanted_held, wanted_tokens, wanted_after), fast = both_do(act, name, times=1)
    assert fast.replays > 5
    assert fast.declined == {"past_key_values is a cache of the caller": 1}
    assert_same_caches(held, wanted_held)
    assert torch.equal(tokens, wanted_tokens)
    assert_same_caches(after, wanted_after)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_static_cache_that_was_asked_for_has_the_length_of_transformers(name: str) -> None:
    def act(model: Any) -> Any:
        options = {**GREEDY, "return_dict_in_generate": True, "cache_implementation": "static"}
        model.generate(prompt(1, 9), **options)
        found = model.generate(prompt(1, 4), **options)
        return found.sequences, found.past_key_values

    (tokens, cache), (wanted, wanted_cache), fast = both_do(act, name, times=1)
    assert fast.replays == 12
    assert torch.equal(tokens, wanted)
    assert [layer.keys.shape for layer in cache.layers] == [layer.keys.shape for layer in wanted_cache.layers]
    assert_same_caches(cache, wanted_cache)


def test_a_returned_cache_can_be_cropped_and_repeated() -> None:
    def act(model: Any) -> Any:
        cache = model.generate(prompt(1, 5), **GREEDY, return_dict_in_generate=True).past_key_values
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        with torch.no_grad():
            return cache, model(input_ids=prompt(2, 3), past_key_values=cache).logits

    (cache, logits), (wanted_cache, wanted_logits), fast = both_do(act)
    assert fast.replays == 12
    assert_same_caches(cache, wanted_cache)
    torch.testing.assert_close(logits, wanted_logits)


def test_a_cache_of_inference_mode_is_used_outside_of_it() -> None:
    def act(model: Any) -> Any:
        with torch.inference_mode():
            first = model.generate(prompt(1, 5), **GREEDY, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, prompt(1, 2, seed=3)], 1)
        return model.generate(ids, past_key_values=first.past_key_values, **GREEDY)

    found, wanted, fast = both_do(act)
    assert fast.replays
    assert torch.equal(found, wanted)


def test_a_cache_within_a_result_of_the_callers_own_generate() -> None:
    """The wrapper is inside of ours: what it makes of the result has a copy too."""
    model, plain = model_of(), model_of()

    def generate(*args: Any, **kwargs: Any) -> Any:
        result = type(model).generate(model, *args, **kwargs, return_dict_in_generate=True)
        return {"tokens": result.sequences, "caches": [result.past_key_values]}

    model.generate = generate
    with accelerate(model) as fast:
        found = model.generate(prompt(1, 5), **GREEDY)
        model.generate(prompt(1, 5, seed=1), **GREEDY)
        assert fast.replays == 12
    wanted = plain.generate(prompt(1, 5), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found["tokens"], wanted.sequences)
    assert_same_caches(found["caches"][0], wanted.past_key_values)


# -- outputs and inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attentions_have_the_columns_of_transformers(name: str) -> None:
    def act(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model.generate(prompt(2, 5), **GREEDY, output_attentions=True, return_dict_in_generate=True)

    found, wanted, fast = both_do(act)
    assert torch.equal(found.sequences, wanted.sequences)
    for ours, theirs in zip(found.attentions, wanted.attentions, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert fast.declined == {"output_attentions has a column for every place of a static cache": 2}


PROMPTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "left padding": lambda model: {"attention_mask": (torch.arange(7) >= torch.tensor([[3], [0]])).long()},
    "right padding": lambda model: {"attention_mask": (torch.arange(7) < torch.tensor([[4], [7]])).long()},
    "a hole": lambda model: {"attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1, 1], [1] * 7])},
    "positions": lambda model: {"position_ids": torch.arange(7).expand(2, 7) * 2 + 3},
    "embeddings": lambda model: {
        "input_ids": None,
        "inputs_embeds": model.get_input_embeddings()(prompt(2, 7)).detach(),
    },
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("given", PROMPTS)
def test_prompts_give_the_logits_of_transformers(name: str, given: str) -> None:
    def act(model: Any) -> Any:
        inputs = {"input_ids": prompt(2, 7)} | PROMPTS[given](model)
        inputs = {key: value for key, value in inputs.items() if value is not None}
        return model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)

    found, wanted, fast = both_do(act)
    assert fast.replays == 12
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits))


def test_a_criterion_that_allows_more_than_was_asked_for() -> None:
    """transformers lets it take the place of max_new_tokens; a cache of ours would be too short."""

    def act(model: Any) -> Any:
        model.config.max_position_embeddings = 8
        return model.generate(prompt(1, 4), max_new_tokens=2, stopping_criteria=[transformers.MaxLengthCriteria(30)])

    found, wanted, fast = both_do(act)
    assert found.shape[1] == 30
    assert torch.equal(found, wanted)
    assert fast.declined.total() == 2


def test_images_are_run_with_the_prompt_alone() -> None:
    """Decode steps after a prompt with an image are those after one without."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=VOCAB, eos_token_id=None)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=60, vision_feature_layer=-1
    )

    def llava() -> Any:
        torch.manual_seed(0)
        model = transformers.LlavaForConditionalGeneration(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        return model

    model, plain = llava(), llava()
    ids = torch.tensor([[5, 60, 60, 60, 60, 7, 8]])
    with accelerate(model) as fast:
        for seed in range(3):
            pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            calls = [{"input_ids": ids, "pixel_values": pixels}, {"input_ids": prompt(1, 6, seed) % 50 + 1}]
            for inputs in calls:
                assert torch.equal(model.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY))
        assert fast.replays == 5 + 5 * 7, fast.explain()


# -- past the model -----------------------------------------------------------------------------------------------

PAST: dict[str, Callable[..., Any]] = {
    "of the class": lambda model, *args, **kwargs: type(model).generate(model, *args, **kwargs),
    "unwrapped": lambda model, *args, **kwargs: model.generate.__wrapped__(model, *args, **kwargs),
}


@pytest.mark.parametrize("way", PAST)
def test_a_call_that_goes_past_the_model_says_so(way: str) -> None:
    found, wanted, fast = both_do(lambda model: PAST[way](model, prompt(1, 5), **GREEDY))
    assert torch.equal(found, wanted)
    assert [*fast.declined] == [
        "generate was called past the model: as type(model).generate, or as generate.__wrapped__"
    ]


def test_a_generate_with_gradients_keeps_them() -> None:
    def act(model: Any) -> Any:
        found = model.generate.__wrapped__(
            model, prompt(1, 5), **GREEDY, output_logits=True, return_dict_in_generate=True
        )
        found.logits[-1].sum().backward()
        return model.lm_head.weight.grad

    found, wanted, _ = both_do(act, times=1)
    torch.testing.assert_close(found, wanted)


def test_replaced_methods_look_like_those_that_they_replace() -> None:
    model, plain = model_of(), model_of()
    with accelerate(model):
        for name in ("generate", "prepare_inputs_for_generation"):
            ours, theirs = getattr(model, name), getattr(plain, name)
            assert inspect.signature(ours) == inspect.signature(theirs)
            assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)
            assert ours.__self__ is model


def test_a_generation_within_another_is_counted_as_what_it_is() -> None:
    """Through the class it is a second one of the same call; alone it is none that is under way."""
    model = model_of()
    inner: list[torch.Tensor] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 7:
            inner.append(type(model).generate(model, prompt(1, 3), **GREEDY))
        return scores

    wanted = model.generate(prompt(1, 5), **GREEDY)
    wanted_inner = model.generate(prompt(1, 3), **GREEDY)
    with accelerate(model) as fast:
        assert torch.equal(model.generate(prompt(1, 5), **GREEDY, logits_processor=[processor]), wanted)
        assert fast.replays == 5
    assert torch.equal(inner[0], wanted_inner)
    assert fast.declined == {"one call of generate began two generations, and its cache serves the first": 1}


# -- what others put around it ------------------------------------------------------------------------------------


def test_undo_leaves_a_wrapper_that_came_later() -> None:
    model = model_of()
    before, wanted = dict(vars(model)), model.generate(prompt(1, 5), **GREEDY)
    fast = accelerate(model)
    ours, calls = model.generate, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return ours(*args, **kwargs)

    model.generate = wrapper
    assert torch.equal(model.generate(prompt(1, 5), **GREEDY), wanted)
    assert fast.replays == 5
    assert accelerate(model) is fast
    fast.undo()
    assert vars(model) == before | {"generate": wrapper}
    assert torch.equal(model.generate(prompt(1, 5), **GREEDY), wanted)
    assert len(calls) == 2
    assert fast.replays == 5
    assert "undone" in fast.explain()
    with accelerate(model) as again:
        assert again is not fast
        assert torch.equal(model.generate(prompt(1, 5), **GREEDY), wanted)
        assert again.replays == 5
    assert model.generate is wrapper


def test_a_with_undoes_what_its_own_accelerate_did() -> None:
    model = model_of()
    before = dict(vars(model))
    outer = accelerate(model)
    with accelerate(model) as inner:
        assert inner is outer
    assert outer.is_installed
    model.generate(prompt(1, 5), **GREEDY)
    assert outer.replays == 5
    outer.undo()
    assert vars(model) == before


def test_a_model_and_its_submodule_are_undone_in_any_order() -> None:
    class Outer(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = transformers.LlamaForCausalLM(config)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    torch.manual_seed(0)
    outer = Outer(DECODERS["llama"].config()).eval()
    models = [outer, outer.inner]
    for model in models:
        model.generation_config.eos_token_id = None
    wanted = outer.generate(prompt(1, 5), **GREEDY)
    for order in (1, -1):
        handles = [accelerate(model) for model in models]
        for model in models * 2:
            assert torch.equal(model.generate(prompt(1, 5), **GREEDY), wanted)
        assert [handle.replays for handle in handles] == [12, 12]
        for handle in handles[::order]:
            handle.undo()
            assert all(torch.equal(model.generate(prompt(1, 5), **GREEDY), wanted) for model in models)
        assert not any("generate" in vars(model) for model in models)


@pytest.mark.parametrize("at", [6, 7, 9])
def test_undo_within_a_generation(at: int) -> None:
    """Before the step is recorded, when it is, and when steps are replays: the rest is plain, and then all is gone."""
    model = model_of()
    before, wanted = dict(vars(model)), model.generate(prompt(1, 5), **GREEDY)
    fast = accelerate(model)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == at:
            fast.undo()
        return scores

    assert torch.equal(model.generate(prompt(1, 5), **GREEDY, logits_processor=[processor]), wanted)
    assert fast.eager_steps["the handle was undone within the generation"] == 13 - at - 1
    assert vars(model) == before
    assert "cache of" not in fast.explain()


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_inputs_that_somebody_prepares_from_now_on(is_wrapped: bool) -> None:
    """As adapters do around a call, by a wrapper of ours or in its place; they see inputs that are prepared."""

    def act(model: Any) -> Any:
        found = model.prepare_inputs_for_generation
        if not is_wrapped:
            found = type(model).prepare_inputs_for_generation.__get__(model)

        def prepare(*args: Any, **kwargs: Any) -> Any:
            inputs = found(*args, **kwargs)
            assert inputs["position_ids"].shape == inputs["input_ids"].shape
            mask = inputs.get("attention_mask")
            if mask is not None and mask.dim() == 2:  # of transformers' growing cache
                mask[:, 1] = 0
            elif mask is not None:
                mask[..., 1] = False
            return inputs

        model.prepare_inputs_for_generation = prepare
        try:
            mask = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
            return model.generate(prompt(2, 7), attention_mask=mask, **GREEDY)
        finally:
            model.prepare_inputs_for_generation = found

    found, wanted, fast = both_do(act)
    assert torch.equal(found, wanted)
    assert fast.replays + fast.eager_steps.total() == 14, fast.explain()


def test_a_forward_that_was_replaced_is_followed() -> None:
    def act(model: Any) -> Any:
        results = [model.generate(prompt(1, 5), **GREEDY)]
        own = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = own(*args, **kwargs)
            outputs.logits = outputs.logits.flip(-1)
            return outputs

        model.forward = forward
        results.append(model.generate(prompt(1, 5), **GREEDY))
        del model.forward
        return [*results, model.generate(prompt(1, 5), **GREEDY)]

    found, wanted, fast = both_do(act)
    assert all(map(torch.equal, found, wanted))
    assert fast.replays > 30


def test_a_handle_can_be_copied() -> None:
    fast = accelerate(model_of())
    wanted = fast.model.generate(prompt(1, 5), **GREEDY)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert copied.model is not fast.model
        assert accelerate(copied.model) is copied
        assert torch.equal(copied.model.generate(prompt(1, 5), **GREEDY), wanted)
        assert copied.replays == 5
        copied.undo()
        assert fast.is_installed


def test_a_shallow_copy_runs_its_own_model() -> None:
    """It shares attributes and weights with the model, until it is given others."""
    model = model_of()
    wanted = model.generate(prompt(1, 5), **GREEDY)
    fast = accelerate(model)
    twin = copy.copy(model)
    twin._modules = {**model._modules, "lm_head": copy.deepcopy(model.lm_head)}
    with torch.no_grad():
        twin.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    plain = model_of()
    plain.lm_head = twin.lm_head
    assert torch.equal(twin.generate(prompt(1, 5), **GREEDY), plain.generate(prompt(1, 5), **GREEDY))
    assert fast.generations == 0
    assert set(vars(model)) - set(vars(twin)) >= {"generate", "__getstate__"}
    assert torch.equal(model.generate(prompt(1, 5), **GREEDY), wanted)
    assert fast.replays == 5
    with accelerate(twin) as other:  # it can be accelerated as any model
        assert other is not fast
        assert torch.equal(twin.generate(prompt(1, 5), **GREEDY), plain.generate(prompt(1, 5), **GREEDY))
        assert other.replays == 5
    fast.undo()
    assert "__getstate__" not in vars(model)


def test_a_shallow_copy_keeps_what_others_have_put_over_generate() -> None:
    model = model_of()
    model.generate = own = functools.partial(type(model).generate, model)
    accelerate(model)
    assert copy.copy(model).generate is own


# -- what is said -------------------------------------------------------------------------------------------------


def test_no_generation_is_said_to_have_graphs_when_none_was_replayed() -> None:
    model = model_of()
    with accelerate(model) as fast:
        model.generate(prompt(1, 5), max_new_tokens=2, do_sample=False)
        said = fast.explain()
        assert "0 generations with graphs, 1 without" in said
        assert "1 without: none of their steps was a replay" in said
        model.generate(prompt(1, 5), **GREEDY)
        assert "1 generations with graphs, 1 without" in fast.explain()
