"""Hugging Face models: recorded with the tokens of the eager model, or refused with a sentence; none silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import StaticCache

from hugging_face import DECODERS, ENCODERS, VOCAB, WINDOW, Family, layers_of, linear_of, made, prompt
from phonograph import Buckets, Graphed, Pad, Slot, graphed
from phonograph.graphs.progress import silent

pytestmark = pytest.mark.slow

LENGTH = 8
FAST = {"llama", "gpt2", "gemma3", "bert", "t5 encoder"}
"""The others run with the slow tests."""


def each(families: dict[str, Family], *, recorded: bool = False) -> list[Any]:
    """Families as parameters of a test."""
    names = [name for name, family in families.items() if not (recorded and family.refusal)]
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """By model, whether it is recorded, or why not; printed as a table at the end."""
    found: dict[str, str] = {}
    yield found
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(f"{name:22}{verdict}" for name, verdict in found.items()))


def slot(name: str, *shape: int | str, high: int) -> Slot:
    return Slot(name, ("seqs", *shape), torch.int64, pad=Pad.fill(1), valid=(1, high))


def recorded(decode: Callable[..., Any], num_seqs: int, **options: Any) -> Graphed:
    exact = Buckets.of(num_seqs, exact=True)
    slots = [slot("input_ids", 1, high=VOCAB - 1)]
    run = graphed(decode, slots=slots, bucketed="seqs", buckets=exact, device="emulated", **options)
    run.capture(silent)
    return run


def stated(run: Graphed) -> str:
    """The verdict on a model."""
    assert run.runner.report is not None
    failures = run.runner.report.failures
    return f"refused: {failures[0].error}" if failures else "recorded"


def assert_verdict(run: Graphed, family: Family) -> None:
    verdict = stated(run)
    if family.refusal:
        assert verdict.startswith("refused: ")
        assert family.refusal in verdict
        assert verdict.endswith((".", "gap", "slot", "@graph_break", "'breakable'")), verdict
    else:
        assert verdict == "recorded"
        verified = run.verify()
        assert verified.ok, verified


# -- decoders: tokens and logits of two generations ---------------------------------------------------------------


class Decoding:
    """A decoder over a static cache, whose step may be a recording."""

    def __init__(self, model: Any, num_seqs: int, max_len: int) -> None:
        self.model, self.num_seqs = model, num_seqs
        self.cache = StaticCache(config=model.config, max_cache_len=max_len)
        self.step: Callable[[torch.Tensor], torch.Tensor] = self.decode
        self.run: Graphed | None = None

    def decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True).logits[:, -1]

    def record(self) -> None:
        self.step = self.run = recorded(self.decode, self.num_seqs)

    @torch.no_grad()
    def generate(self, length: int, num_tokens: int, *, seed: int = 0, record_at: int | None = None) -> list[Any]:
        """Logits of a prompt and of greedy tokens; recorded before the prompt (-1), or before one of the tokens."""
        if record_at == -1:
            self.record()
        logits = [self.decode(prompt(self.num_seqs, length, seed))] if length else []
        token = logits[-1].argmax(-1, keepdim=True) if length else prompt(self.num_seqs, 1, seed)
        for index in range(num_tokens):
            if record_at == index:
                self.record()
            logits.append(self.step(token))
            token = logits[-1].argmax(-1, keepdim=True)
        return logits


SCHEDULES = {
    "before the first token": {"length": 0, "record_at": -1, "num_seqs": 1},
    "before the prompt": {"length": 4, "record_at": -1, "num_seqs": 2},
    "before the window is crossed": {"length": 3, "record_at": 1, "num_seqs": 1},
    "when the window is crossed": {"length": WINDOW - 1, "record_at": 1, "num_seqs": 1},
    "after the window is crossed": {"length": 4, "record_at": WINDOW, "num_seqs": 3},
    "at the last place of the cache": {"length": 4, "record_at": 2 * WINDOW - 1, "num_seqs": 1},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", each(DECODERS))
def test_a_decoder_gives_the_logits_of_eager(name: str, schedule: str, verdicts: dict[str, str]) -> None:
    """Whenever it is recorded, and in a second generation after a reset of the cache."""
    model, (length, record_at, num_seqs) = made(DECODERS[name]), SCHEDULES[schedule].values()
    num_tokens = 2 * WINDOW
    eager, served = (Decoding(model, num_seqs, length + num_tokens) for _ in range(2))
    wanted = eager.generate(length, num_tokens)
    found = served.generate(length, num_tokens, record_at=record_at)
    assert served.run is not None
    num_replays = served.run.stats.replays.total()
    for one in (eager, served):
        one.cache.reset()
    wanted += eager.generate(WINDOW + 1, 4, seed=1)
    found += served.generate(WINDOW + 1, 4, seed=1)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    verdicts[name] = stated(served.run)
    expected = 0 if DECODERS[name].refusal else num_tokens - max(0, record_at)
    assert num_replays == expected
    assert served.run.stats.replays.total() == (expected + 4 if expected else 0)
    served.cache.reset()
    assert_verdict(served.run, DECODERS[name])


# -- decoders: what changes while they serve ----------------------------------------------------------------------

Undo = Callable[[], Any]


def in_train_mode(one: Decoding) -> Undo:
    one.model.train()
    return one.model.eval


def one_layer_in_train_mode(one: Decoding) -> Undo:
    layers_of(one.model)[1].train()
    return one.model.eval


def attention_of_another_kind(one: Decoding) -> Undo:
    one.model.set_attn_implementation("eager")
    return lambda: one.model.set_attn_implementation("sdpa")


def weight_replaced(one: Decoding) -> Undo:
    linear, weight = linear_of(one.model), linear_of(one.model).weight
    linear.weight = torch.nn.Parameter(weight * 1.5)
    return lambda: setattr(linear, "weight", weight)


def layers_swapped(one: Decoding) -> Undo:
    layers = layers_of(one.model)

    def swap() -> None:
        layers[0], layers[1] = layers[1], layers[0]

    swap()
    return swap


def hooked(one: Decoding) -> Undo:
    handle: Any = linear_of(one.model).register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return handle.remove


def patched(one: Decoding) -> Undo:
    linear = linear_of(one.model)
    forward = linear.forward
    linear.forward = lambda x: forward(x) * 1.5
    return lambda: delattr(linear, "forward")


def norms_of_another_epsilon(one: Decoding) -> Undo:
    norms = [(part, key) for part in one.model.modules() for key in ("eps", "variance_epsilon") if key in vars(part)]
    old = [getattr(part, key) for part, key in norms]
    for part, key in norms:
        setattr(part, key, 0.5)

    def undo() -> None:
        for (part, key), value in zip(norms, old, strict=True):
            setattr(part, key, value)

    return undo


def another_cache(one: Decoding) -> Undo:
    old, one.cache = one.cache, StaticCache(config=one.model.config, max_cache_len=40)
    one.decode(prompt(one.num_seqs, 5))
    return lambda: setattr(one, "cache", old)


def another_layer_of_the_cache(one: Decoding) -> Undo:
    layers, old = one.cache.layers, one.cache.layers[0]
    layers[0] = StaticCache(config=one.model.config, max_cache_len=old.max_cache_len).layers[0]
    layers[0].lazy_initialization(old.keys, old.values)
    layers[0].cumulative_length.copy_(old.cumulative_length)
    return lambda: layers.__setitem__(0, old)


UNDONE: list[Callable[[Decoding], Undo]] = [
    in_train_mode, one_layer_in_train_mode, attention_of_another_kind, weight_replaced, layers_swapped, hooked, patched,
    norms_of_another_epsilon, another_cache, another_layer_of_the_cache,
]  # fmt: skip
"""Calls are eager until it is undone."""


def cache_reset(one: Decoding) -> None:
    one.cache.reset()
    one.decode(prompt(one.num_seqs, 5, seed=3))


def weights_loaded(one: Decoding) -> None:
    one.model.load_state_dict({name: value * 1.1 for name, value in one.model.state_dict().items()})


def generation_beside(one: Decoding) -> None:
    one.model.generate(prompt(1, 3), max_new_tokens=3, do_sample=False)


def attributes_that_nothing_reads(one: Decoding) -> None:
    one.model.note, layers_of(one.model)[0].note, one.model.generation_config.temperature = 1, 2, 0.5


def train_mode_and_back(one: Decoding) -> None:
    one.model.train()
    one.model.eval()


def conversions_to_what_it_is(one: Decoding) -> None:
    one.model.float().to("cpu").requires_grad_(False)


HARMLESS: list[Callable[[Decoding], None]] = [
    cache_reset, weights_loaded, generation_beside, attributes_that_nothing_reads, train_mode_and_back,
    conversions_to_what_it_is,
]  # fmt: skip
"""Calls are replays throughout, and right."""


def steps(several: tuple[Decoding, Decoding], count: int = 2) -> int:
    """Some tokens of an eager decoder and of one that serves, which must be equal; how many were replays."""
    served = several[1]
    assert served.run is not None
    before = served.run.stats.replays.total()
    for index in range(count):
        found = []
        for one in several:
            torch.manual_seed(index)
            with torch.no_grad():
                found.append(one.step(prompt(one.num_seqs, 1, seed=before + index)))
        assert torch.equal(*found), served.run.explain()
    return served.run.stats.replays.total() - before


@pytest.mark.parametrize("name", each(DECODERS, recorded=True))
def test_a_decoder_that_serves_follows_every_change(name: str) -> None:
    both = Decoding(made(DECODERS[name]), 2, 120), Decoding(made(DECODERS[name]), 2, 120)
    for one in both:
        one.generate(4, 0)
    both[1].record()
    with torch.no_grad():
        for harmless in HARMLESS:
            for one in both:
                harmless(one)
            assert steps(both) == 2, harmless.__name__
        for change in UNDONE:
            if change is attention_of_another_kind and both[0].model.config._attn_implementation == "eager":
                continue  # the only kind that it has
            undo = [change(one) for one in both]
            assert steps(both) == 0, change.__name__
            for back in undo:
                back()
            assert steps(both) == 2, change.__name__


@pytest.mark.parametrize("name", each(DECODERS, recorded=True))
def test_a_decoder_of_another_dtype_is_eager_until_it_is_recorded_again(name: str) -> None:
    both = Decoding(made(DECODERS[name]), 1, 60), Decoding(made(DECODERS[name]), 1, 60)
    both[1].record()
    assert both[1].run is not None
    steps(both)
    for one in both:
        one.model.half()
        one.cache = StaticCache(config=one.model.config, max_cache_len=60)
    assert steps(both) == 0
    assert not both[1].run.refresh(silent).failures
    assert steps(both) == 2


@pytest.mark.parametrize("name", each(DECODERS, recorded=True))
def test_a_conversion_with_an_old_cache_raises_as_it_does_eagerly(name: str) -> None:
    """The cache is of another dtype than the keys: eager code says so, and no replay goes on with old weights."""
    one = Decoding(made(DECODERS[name]), 1, 60)
    one.generate(4, 2, record_at=0)
    one.model.half()
    with pytest.raises(RuntimeError, match="same dtype"), torch.no_grad():
        one.step(prompt(1, 1))


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bloom", "opt"))])
def test_autocast_is_a_fact(name: str) -> None:
    """Recorded inside of it, a decoder is eager outside, and the other way round."""
    family = DECODERS.get(name, DECODERS["opt, no mask"])
    both = Decoding(made(family), 1, 60), Decoding(made(family), 1, 60)
    with torch.autocast("cpu", torch.float16):
        both[1].record()
        inside = steps(both, 3)
    assert inside == (3 if not family.refusal else 0)
    for one in both:
        one.cache.reset()
        with pytest.raises(RuntimeError, match="same dtype"), torch.no_grad():
            one.step(prompt(1, 1))
        one.cache.reset()
    with torch.autocast("cpu", torch.float16):
        assert steps(both, 3) == inside


def test_batches_of_several_sizes_have_a_cache_each() -> None:
    """One static cache has one batch size."""
    model = made(DECODERS["llama"])
    sizes = (1, 2, 4)

    def decoder() -> Callable[..., Any]:
        caches = {size: StaticCache(config=model.config, max_cache_len=24) for size in sizes}
        return lambda input_ids: model(input_ids=input_ids, past_key_values=caches[len(input_ids)]).logits[:, -1]

    eager, slots = decoder(), [slot("input_ids", 1, high=VOCAB - 1)]
    run = graphed(decoder(), slots=slots, bucketed="seqs", buckets=Buckets.of(*sizes, exact=True), device="emulated")
    assert not run.capture(silent).failures
    assert run.verify().ok
    with torch.no_grad():
        for seed, size in enumerate(sizes * 3):
            assert torch.equal(run(prompt(size, 1, seed)), eager(prompt(size, 1, seed)))
    assert run.stats.replays.total() == 9


def test_a_cache_for_other_batches_is_refused() -> None:
    one = Decoding(made(DECODERS["llama"]), 4, 24)
    slots = [slot("input_ids", 1, high=VOCAB - 1)]
    run = graphed(one.decode, slots=slots, bucketed="seqs", buckets=[2, 4], device="emulated")
    failures = run.capture(silent).failures
    assert len(failures) == 2
    assert "use Buckets.of(" in str(failures[0].error)
    with torch.no_grad():
        assert run(prompt(3, 1)).shape == (3, VOCAB)  # trial runs left no cache for four


# -- encoders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(ENCODERS))
def test_an_encoder_gives_the_outputs_of_eager(name: str, verdicts: dict[str, str]) -> None:
    """For every bucket and mask, in other modes and dtypes, and recorded again."""
    model = made(ENCODERS[name])

    def encode(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    slots = [slot("input_ids", LENGTH, high=VOCAB - 1), slot("attention_mask", LENGTH, high=1)]
    run = graphed(encode, slots=slots, bucketed="seqs", buckets=[1, 2, 4], device="emulated")
    run.capture(silent)
    verdicts[name] = stated(run)
    assert_verdict(run, ENCODERS[name])

    def assert_equal(*, replays: bool) -> None:
        for num_seqs in (1, 2, 3, 4):
            ids = prompt(num_seqs, LENGTH, seed=num_seqs)
            mask = (torch.arange(LENGTH) < torch.tensor([[3], [8], [5], [1]])[:num_seqs]).long()
            before = run.stats.replays.total()
            with torch.no_grad():
                found, wanted = (torch.manual_seed(0) and one(ids, mask) for one in (run, encode))
            torch.testing.assert_close(found, wanted)
            assert run.stats.replays.total() - before == replays, run.explain()

    assert_equal(replays=True)
    model.train()
    assert_equal(replays=False)
    model.eval()
    assert_equal(replays=True)
    with torch.autocast("cpu", torch.float16):
        assert_equal(replays=False)
    assert_equal(replays=True)
    model.double()
    assert_equal(replays=False)
    assert not run.refresh(silent).failures
    assert_equal(replays=True)
