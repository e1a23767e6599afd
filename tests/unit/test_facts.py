"""Facts: what a recording took for granted. A change is seen and named; what does not matter raises no alarm."""

from __future__ import annotations

import enum
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from phonograph import DeclarationError, Graphed, Pad, Reason, Replay, RunEagerly, Slot, graph_break, graphed
from phonograph.graphs.progress import silent
from phonograph.graphs.recording import dict_versions, facts
from phonograph.graphs.recording.bytecode import reads_of
from phonograph.graphs.recording.fact import shown
from phonograph.graphs.recording.fact_check import WINDOW
from phonograph.graphs.recording.facts import records_reads

GLOBAL_SCALE = 2.0
SLOTS = [Slot("x", ("rows", 4), torch.float32, pad=Pad.fill(0))]
X = torch.arange(12.0).reshape(3, 4)


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(60)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def made(function: Callable[..., Any], **options: Any) -> Graphed:
    found = graphed(function, slots=SLOTS, bucketed="rows", buckets=[1, 4], device="emulated", **options)
    report = found.capture(silent)
    assert not report.failures, report
    return found


def decided(run: Graphed) -> RunEagerly | Replay:
    run(X)
    assert run.runner.last is not None
    return run.runner.last


def assert_replays(run: Graphed, times: int = 1) -> None:
    for _ in range(times):
        found = decided(run)
        assert isinstance(found, Replay), found


def assert_stale(run: Graphed, name: str) -> RunEagerly:
    """Within the window, a call is eager for this fact."""
    for _ in range(WINDOW):
        found = decided(run)
        if isinstance(found, RunEagerly):
            assert found.reason is Reason.STALE
            assert name in found.detail
            return found
    raise AssertionError(f"{name} was not seen in {WINDOW} calls")


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.5


@dataclass
class Config:
    factor: float = 2.0
    mode: str = "plain"
    sizes: tuple[int, ...] = (1, 2)


class Model(torch.nn.Module):
    rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.ReLU()])
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(4))
        self.config = Config()
        self.slotted = Slotted()
        self.table = {"a": 1.0, "b": 2.0}
        self.pair = [1.0, 2.0]
        self.steps: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.relu]
        self.constant = torch.full((4,), 2.0)
        self.unread = 1.0

    @property
    def scaling(self) -> float:
        return self.config.factor * self.rate

    def scaled(self, x: torch.Tensor, by: float = 2.0, *, less: float = 1.0) -> torch.Tensor:
        return x * by - less

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.linear(x)) * self.scaling + self.shift
        for layer in self.layers:
            x = layer(x)
        for step in self.steps:
            x = step(x)
        if self.config.mode == "plain":
            x = self.scaled(x) * self.slotted.gain
        x = x * self.table["a"] + self.pair[0] + self.constant
        return x * GLOBAL_SCALE * len(getattr(self.config, "sizes", ()))


@contextmanager
def changed(owner: Any, name: Any, value: Any) -> Iterator[None]:
    """`owner.name` or `owner[name]` is another inside."""
    if isinstance(owner, dict | list):
        before, owner[name] = owner[name], value
    else:
        before = getattr(owner, name)
        setattr(owner, name, value)
    try:
        yield
    finally:
        if isinstance(owner, dict | list):
            owner[name] = before
        else:
            setattr(owner, name, before)


@contextmanager
def changed_on_instance(owner: Any, name: str, value: Any) -> Iterator[None]:
    setattr(owner, name, value)
    yield
    delattr(owner, name)


@contextmanager
def trained(model: Model) -> Iterator[None]:
    model.train()
    yield
    model.eval()


@contextmanager
def hooked(model: Model) -> Iterator[None]:
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def patched_forward(model: Model) -> Iterator[None]:
    linear: Any = model.linear
    linear.forward = lambda x: x
    yield
    del linear.forward


@contextmanager
def longer(steps: list[Any]) -> Iterator[None]:
    steps.append(torch.sigmoid)
    yield
    steps.pop()


@contextmanager
def moved(parameter: torch.nn.Parameter) -> Iterator[None]:
    before = parameter.data
    parameter.data = before.clone()
    yield
    parameter.data = before


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def set_back(set_to: Callable[[Any], None], now: Any, then: Any) -> Iterator[None]:
    set_to(now)
    yield
    set_to(then)


def new_parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 4))


CHANGES: dict[str, tuple[str, Callable[[Model], Any]]] = {
    "attribute": ("Config.factor is 3, was 2 at capture", lambda m: changed(m.config, "factor", 3.0)),
    "string": ("Config.mode is 'other', was 'plain'", lambda m: changed(m.config, "mode", "other")),
    "getattr": ("Config.sizes", lambda m: changed(m.config, "sizes", (1, 2, 3))),
    "object": ("Model.config", lambda m: changed(m, "config", Config(factor=4.0))),
    "class attribute": ("Model.rate is 0.25", lambda m: changed(Model, "rate", 0.25)),
    "shadowed class attribute": ("Model.rate", lambda m: changed_on_instance(m, "rate", 0.25)),
    "method": ("Model.scaled", lambda m: changed(Model, "scaled", lambda self, x: x)),
    "slot": ("Slotted.gain is 2.5", lambda m: changed(m.slotted, "gain", 2.5)),
    "dict item": ("self.table['a'] is 5", lambda m: changed(m.table, "a", 5.0)),
    "list item": ("self.pair[0] is 5", lambda m: changed(m.pair, 0, 5.0)),
    "list that is iterated": ("self.steps", lambda m: longer(m.steps)),
    "global": ("GLOBAL_SCALE is 3", lambda m: changed(sys.modules[__name__], "GLOBAL_SCALE", 3.0)),
    "default": ("Model.scaled.__defaults__", lambda m: changed(Model.scaled, "__defaults__", (3.0,))),
    "keyword default": (
        "Model.scaled.__kwdefaults__",
        lambda m: changed(Model.scaled, "__kwdefaults__", {"less": 2.0}),
    ),
    "training": ("Model.dropout.training is True", trained),
    "hook": ("hooks of Model.layers.0", hooked),
    "forward of an instance": ("Model.linear.forward", patched_forward),
    "parameter": ("Model.linear.weight", lambda m: changed(m.linear, "weight", new_parameter())),
    "buffer": ("Model.shift", lambda m: changed(m, "shift", torch.zeros(4))),
    "plain tensor": ("Model.constant", lambda m: changed(m, "constant", torch.zeros(4))),
    "memory of a parameter": ("Model.linear.bias", lambda m: moved(m.linear.bias)),
    "layer": ("Model.layers", lambda m: changed(m.layers._modules, "1", torch.nn.Tanh())),
    "autocast": ("autocast on cpu", lambda m: torch.autocast("cpu", torch.float16)),
    "default dtype": ("torch.get_default_dtype()", lambda m: default_dtype(torch.float64)),
    "deterministic": (
        "deterministic_algorithms",
        lambda m: set_back(torch.use_deterministic_algorithms, True, False),
    ),
    "matmul precision": ("precision", lambda m: set_back(torch.set_float32_matmul_precision, "high", "highest")),
    "attention backend": ("flash_sdp", lambda m: set_back(torch.backends.cuda.enable_flash_sdp, False, True)),
    "default device": ("default device", lambda m: set_back(torch.set_default_device, "cpu:0", None)),
}


@pytest.fixture(scope="module")
def serving() -> tuple[Model, Graphed]:
    torch.manual_seed(0)
    model = Model().eval()

    def body(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return model, made(body)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_fact_makes_calls_eager_and_right_until_it_is_back(serving: tuple[Model, Graphed], kind: str) -> None:
    model, run = serving
    name, change = CHANGES[kind]
    assert_replays(run)
    with change(model):
        assert_stale(run, name)
        assert isinstance(decided(run), RunEagerly)  # and stays so
        if kind not in ("training", "autocast"):
            torch.testing.assert_close(run(X), model(X))
    assert_replays(run, 3)
    torch.testing.assert_close(run(X), model(X))


def other_attribute(model: Model) -> None:
    model.unread += 1.0
    model.extra = object()  # type: ignore[assignment]


def loaded_again(model: Model) -> None:
    model.load_state_dict({name: value.clone() + 1 for name, value in model.state_dict().items()})


def optimized(model: Model) -> None:
    parameters = [*model.linear.parameters()]
    with torch.enable_grad():
        model.linear(X).sum().backward()
    torch.optim.SGD(parameters, lr=0.1).step()


def hooked_elsewhere(model: Model) -> None:
    torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)


UNRELATED: dict[str, Callable[[Model], Any]] = {
    "an attribute that nobody reads": other_attribute,
    "an equal value": lambda m: setattr(m.config, "factor", float("2.0")),
    "another key of a dict": lambda m: m.table.update(c=3.0),
    "load_state_dict": loaded_again,
    "optimizer step": optimized,
    "requires_grad_": lambda m: m.requires_grad_(False),
    "to() that moves nothing": lambda m: m.to("cpu", torch.float32),
    "eval() again": lambda m: m.eval(),
    "a hook of another module": hooked_elsewhere,
    "a global of the same module": lambda m: globals().__setitem__("SOMETHING_ELSE", object()),
    "number of threads": lambda m: torch.set_num_threads(torch.get_num_threads()),
}


@pytest.mark.parametrize("kind", UNRELATED)
def test_a_change_of_something_else_is_no_alarm(serving: tuple[Model, Graphed], kind: str) -> None:
    model, run = serving
    for _ in range(4):
        UNRELATED[kind](model)
        assert_replays(run)
    assert_replays(run, WINDOW + 1)
    torch.testing.assert_close(run(X), model(X))


def test_closure_cells_are_facts() -> None:
    scale = 2.0

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    run = made(body)
    assert_replays(run)
    scale = 3.0
    assert_stale(run, "scale is 3, was 2 at capture")
    assert torch.equal(run(X), X * 3)
    scale = 2.0
    assert_replays(run)


@pytest.mark.parametrize("num_layers", [1, 3, 40])
@pytest.mark.parametrize("num_calls", [0, 1, 7, WINDOW - 1])
def test_a_module_that_moves_as_a_whole_is_seen_at_once(num_layers: int, num_calls: int) -> None:
    """Without buffers nothing but the addresses of parameters tells that a module is of another dtype."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(num_layers)))
    run = made(lambda x: model(x.to(model[0].weight.dtype)))
    assert_replays(run, num_calls)
    model.double()
    found = decided(run)
    assert isinstance(found, RunEagerly)
    assert found.reason is Reason.STALE
    assert run(X).dtype is torch.float64


def test_refresh_records_again_only_what_is_stale() -> None:
    config = Config()
    run = made(lambda x: x * config.factor)
    report = run.runner.report
    assert run.refresh(silent) is report
    config.factor = 5.0
    assert_stale(run, "Config.factor")
    assert run.refresh(silent) is not report
    assert_replays(run)
    assert torch.equal(run(X), X * 5)


def test_counts_explanation_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = Config()
    run = made(lambda x: x * config.factor)
    config.factor = 3.0
    with caplog.at_level(logging.WARNING, "phonograph"):
        for _ in range(3):
            run(X)
    assert run.stats.eager[Reason.STALE] == 3
    assert "3 stale: Config.factor is 3, was 2 at capture" in run.explain()
    assert f"{__file__}:" in run.explain()
    assert sum("Config.factor" in record.getMessage() for record in caplog.records) == 1
    assert run.facts().stale is not None
    assert not run.verify()


@pytest.mark.parametrize("option", ["verify", "off"])
def test_without_a_check_at_calls(option: Any) -> None:
    config = Config()
    run = made(lambda x: x * config.factor, facts=option)
    config.factor = 3.0
    assert_replays(run)
    report = run.verify()
    named = [check for check in report.failures if check.name == "facts"]
    assert bool(named) is (option == "verify")
    assert len(run.facts()) > 0 if option == "verify" else len(run.facts()) == 0


class Cache:
    def __init__(self) -> None:
        self.hits = 0


def test_what_is_ignored_is_neither_a_fact_nor_state() -> None:
    cache = Cache()

    def body(x: torch.Tensor) -> torch.Tensor:
        cache.hits += 1
        return x * 2

    run = made(body, ignore=["cache.hits"])
    cache.hits = 100
    assert_replays(run)
    assert not any("hits" in fact.name for fact in run.facts())
    assert "ignored: cache.hits" in str(run.facts())


def test_a_memo_that_fills_up_is_no_alarm() -> None:
    memo: dict[int, torch.Tensor] = {}

    def table(size: int) -> torch.Tensor:
        if size not in memo:
            memo[size] = torch.full((4,), 2.0)
        return memo[size]

    run = made(lambda x: x * table(x.shape[0]))
    assert_replays(run)
    for size in range(10, 15):
        table(size)
        assert_replays(run)


def test_what_only_gaps_read_is_live() -> None:
    config = Config()

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        return x * config.factor

    run = made(lambda x: gap(x + 1) + 1, backend="breakable")
    config.factor = 7.0
    assert_replays(run)
    assert torch.equal(run(X), (X + 1) * 7 + 1)


def test_what_a_branch_did_not_read_is_no_fact() -> None:
    config = types.SimpleNamespace(on=False, amount=2.0)
    run = made(lambda x: x * config.amount if config.on else x)
    config.amount = 3.0
    assert_replays(run)
    config.on = True
    assert_stale(run, "SimpleNamespace.on is True, was False")


def test_objects_that_a_body_makes_are_no_facts() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        config = Config()
        config.factor = float(x.shape[0])
        return x * config.factor

    run = made(body)
    assert not any(fact.name == "Config.factor" and fact.value != Config.factor for fact in run.facts())


def test_strict_names_the_fact() -> None:
    config = Config()
    run = made(lambda x: x * config.factor, strict=True)
    config.factor = 3.0
    with pytest.raises(Exception, match=r"Config\.factor is 3"):
        run(X)


def test_many_values_are_checked_by_versions_and_go_over_to_values_where_others_are_stored() -> None:
    deep = Deep()
    run, model = made(deep), deep.layers
    assert ("dict versions and" in run.facts().method) is dict_versions.are_reliable()
    for index in range(6):
        model[3].extra = index  # type: ignore[assignment]
        assert_replays(run)
    assert_replays(run, WINDOW + 1)
    before, model[40].weight = model[40].weight, new_parameter()
    assert_stale(run, "Deep.layers.40.weight")
    model[40].weight = before
    assert_replays(run)


def test_without_dict_versions_values_are_still_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dict_versions, "are_reliable", lambda: False)
    deep = Deep()
    run, model = made(deep), deep.layers
    assert "tells no dict versions" in run.facts().method
    before, model[40].weight = model[40].weight, new_parameter()
    assert_stale(run, "Deep.layers.40.weight")
    model[40].weight = before
    assert_replays(run, WINDOW + 1)


def test_while_a_debugger_traces_values_are_not_watched_and_facts_say_so() -> None:
    config = Config()
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        run = made(lambda x: x * config.factor)
    finally:
        sys.settrace(before)
    assert any("no values that the body reads" in note for note in run.facts().notes)
    with torch.autocast("cpu", torch.float16):
        assert_stale(run, "autocast")


def test_where_the_recorder_does_not_work_values_are_not_watched_and_facts_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "records_reads", lambda: False)
    config = Config()
    run = made(lambda x: x * config.factor)
    assert any("no values that the body reads: on this Python" in note for note in run.facts().notes)
    assert {fact.kind for fact in run.facts()} == {"mode"}
    assert_replays(run)
    with torch.autocast("cpu", torch.float16):
        assert_stale(run, "autocast")


def test_the_self_tests_pass_here() -> None:
    assert records_reads()
    if sys.version_info < (3, 13):
        assert dict_versions.are_reliable()


def test_reads_of_a_function() -> None:
    def body(a: Any, b: Any) -> Any:
        with nullcontext():
            return a.one.two["k"][0] + getattr(b, "name", None) + (a.x if b.y else a.z) + GLOBAL_SCALE

    found = {str(read) for read in reads_of(body.__code__).values()}
    assert {
        "a.one",
        "a.one.two",
        "a.one.two['k']",
        "a.one.two['k'][0]",
        "getattr(b, 'name', None)",
        "a.x",
        "b.y",
        "a.z",
    } <= found
    assert "GLOBAL_SCALE" in found


def test_options_are_checked() -> None:
    with pytest.raises(DeclarationError, match="facts is 'sometimes'"):
        made(lambda x: x, facts="sometimes")


def test_release_lets_go_of_tensors_at_once() -> None:
    model = Model().eval()
    run = made(model)
    assert_replays(run)
    watched = weakref.ref(model.linear.weight)
    run.release()
    gc.disable()
    try:
        del run
        model.linear = torch.nn.Linear(4, 4)
        assert watched() is None
    finally:
        gc.enable()


def test_temporaries_of_warm_ups_are_not_kept() -> None:
    class Output:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    made_here: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        output = Output(x * 2)
        made_here.append(weakref.ref(output.value))
        return output.value + 1

    run = made(body, ignore=["made_here"], preserve=lambda batch: nullcontext())
    assert not any(fact.name == "Output.value" for fact in run.facts())


def test_a_member_of_an_enum_is_shown_by_its_name() -> None:
    class Mode(enum.Enum):
        FAST = object()

    assert shown(Mode.FAST) == "Mode.FAST"
