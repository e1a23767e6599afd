"""graphed: the ten lines that a user writes."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import phonograph
from phonograph import (
    Buckets,
    BufferPool,
    DeclarationError,
    Device,
    Extent,
    Graphed,
    Pad,
    PlanError,
    Reason,
    Replay,
    RunEagerly,
    ShapeKey,
    Slot,
    VerifyError,
    break_graph,
    current,
    graph_break,
    graphed,
)
from phonograph.devices import Capabilities, EmulatedDevice
from phonograph.graphs import graphed as wrap
from phonograph.graphs.progress import silent
from runners import equal

SLOTS = [Slot("x", ("seqs", 16), torch.float32), Slot("lens", ("seqs",), torch.int32, pad=Pad.fill(1))]


def step(x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return x * lens[:, None]


def inputs(device: Device, count: int) -> dict[str, torch.Tensor]:
    x = torch.randn(count, 16, device=device.torch_device)
    lens = torch.randint(1, 9, (count,), dtype=torch.int32, device=device.torch_device)
    return {"x": x, "lens": lens}


def captured(device: Device, **more: Any) -> Graphed:
    run = graphed(step, slots=SLOTS, bucketed="seqs", buckets=Buckets.up_to(8), device=device, **more)
    run.capture(silent)
    return run


def test_the_ten_lines(device: Device) -> None:
    run = graphed(step, slots=SLOTS, bucketed="seqs", buckets=Buckets.up_to(64), device=device)
    report = run.capture(silent)
    assert len(report.rows) == len(Buckets.up_to(64))
    for count in (1, 3, 64, 65):
        batch = inputs(device, count)
        equal(run(**batch), step(**batch))
    assert run.stats.replays.total() == 3
    assert run.stats.eager == {Reason.TOO_LARGE: 1}
    assert "1 too large: 65 seqs" in run.explain()
    assert "decode.backend" in run.explain()
    assert run.verify().ok


def test_a_failed_verify_says_what_goes_on(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Padding leaks into the mean of a batch."""
    slots = [Slot("x", ("seqs", 4), torch.float32, pad=Pad.fill(7))]
    options: dict[str, Any] = {"slots": slots, "bucketed": "seqs", "buckets": Buckets.of(4), "device": device}
    run = graphed(lambda x: x - x.mean(0, keepdim=True), **options)
    run.capture(silent)
    assert not run.verify().ok
    assert "what is wrong is replayed until it is released: verify: " in caplog.text
    with pytest.raises(VerifyError):
        run.capture(silent, verify=True)
    run(x=torch.ones(3, 4, device=device.torch_device))
    assert isinstance(run.runner.last, RunEagerly)


def test_host_and_device_values_positional_and_by_name(device: Device) -> None:
    run = captured(device)
    batch = inputs(device, 3)
    arrays = {name: value.cpu().numpy() for name, value in batch.items()}
    wanted = step(**batch)
    equal(run(batch["x"], batch["lens"]), wanted)
    equal(run(arrays["x"], lens=arrays["lens"]), wanted)
    equal(run(x=arrays["x"].tolist(), lens=arrays["lens"].tolist()), wanted)
    equal(run(**{name: value.cpu() for name, value in batch.items()}), wanted)
    assert run.stats.replays.total() == 4


def test_decide_tells_before_a_call(device: Device) -> None:
    assert isinstance(captured(device).decide(**inputs(device, 3)), Replay)


def test_other_arguments_are_passed_on_and_frozen_in_a_recording(device: Device) -> None:
    def scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    run = graphed(scaled, slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(4), device=device)
    x = inputs(device, 3)["x"]
    equal(run(x=x, factor=5.0), x * 5)  # eager: as given
    run.capture(silent)
    equal(run(x=x), x * 2)


class Slotted:
    __slots__ = ("mode", "x")

    def __init__(self, x: torch.Tensor, mode: str) -> None:
        self.x, self.mode = x, mode


class Named(NamedTuple):
    x: torch.Tensor
    mode: str


@pytest.mark.parametrize("holder", [dict, types.SimpleNamespace, Slotted, Named])
def test_what_lies_beside_a_dotted_slot_is_compared_too(device: Device, holder: Any) -> None:
    def scaled(d: Any) -> torch.Tensor:
        x, mode = (d["x"], d["mode"]) if isinstance(d, dict) else (d.x, d.mode)
        out: torch.Tensor = x * (2 if mode == "a" else 3)
        return out

    def make(count: int, mode: str) -> Any:
        return holder(x=torch.ones(count, 16, device=device.torch_device), mode=mode)

    run = graphed(
        scaled, slots=[Slot("x", ("seqs", 16), torch.float32, source="d.x")], bucketed="seqs", buckets=Buckets.of(4, 8),
        sample=lambda extent, seed: {"d": make(extent.used["seqs"], "a")}, device=device,
    )  # fmt: skip
    run.capture(silent)
    assert float(run(d=make(5, "a"))[0, 0]) == 2
    assert run.stats.replays.total() == 1
    assert float(run(d=make(5, "b"))[0, 0]) == 3
    assert run.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 1}


def test_the_functions_name_is_in_the_keys(device: Device) -> None:
    run = captured(device)
    assert str(run.runner.captured[0]) == "step[seqs=8]"
    assert run.__name__ == "step"  # type: ignore[attr-defined]


def test_the_device_is_that_of_the_parameters() -> None:
    linear = nn.Linear(16, 16)
    run = graphed(linear, slots=[Slot("input", ("seqs", 16), torch.float32)], bucketed="seqs", buckets=Buckets.of(2))
    assert run.runner.device.torch_device == torch.device("cpu")
    method = graphed(
        linear.forward, slots=[Slot("input", ("seqs", 16), torch.float32)], bucketed="seqs", buckets=Buckets.of(2)
    )
    assert method.runner.device.torch_device == torch.device("cpu")


def test_on_the_cpu_it_says_once_that_graphs_are_emulated(caplog: pytest.LogCaptureFixture) -> None:
    wrap._warn_emulated.cache_clear()
    linear = nn.Linear(16, 16)
    slot = Slot("input", ("seqs", 16), torch.float32)
    with caplog.at_level(logging.WARNING, logger="phonograph"):
        graphed(linear, slots=[slot], bucketed="seqs", buckets=Buckets.of(2), device="emulated")
        assert not caplog.records
        for _ in range(2):
            graphed(linear, slots=[slot], bucketed="seqs", buckets=Buckets.of(2))
    assert len(caplog.records) == 1
    assert "emulated on the CPU" in caplog.text


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(hidden)
        return out


class Outer(nn.Module):
    """Embeds on the host's terms, runs the stack, and pools by request: only the stack can be recorded."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.stack = Stack()
        self.to(device.torch_device).requires_grad_(False)

    def forward(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        hidden = self.stack(hidden + 1)
        return torch.stack([part.sum(0) for part in hidden.split(lengths)])


def stack_slots() -> list[Slot]:
    return [Slot("hidden", ("tokens", 16), torch.float32)]


def test_installed_on_a_submodule_the_outer_forward_stays_eager(device: Device) -> None:
    outer = Outer(device)
    run = graphed(outer.stack, slots=stack_slots(), bucketed="tokens", buckets=Buckets.of(4, 8), device=device)
    run.capture(silent)
    hidden = torch.randn(7, 16, device=device.torch_device)
    wanted = outer(hidden, [3, 4])
    with run.installed():
        equal(outer(hidden, [3, 4]), wanted)
        equal(outer(hidden, [1, 1, 5]), outer.__class__.forward(outer, hidden, [1, 1, 5]))
    assert run.stats.replays.total() == 3
    outer(hidden, [7])
    assert run.stats.replays.total() == 3
    assert "_compiled_call_impl" not in outer.stack.__dict__


def test_installation_is_undone_after_an_exception_and_nests(device: Device) -> None:
    outer = Outer(device)
    run = graphed(outer.stack, slots=stack_slots(), bucketed="tokens", buckets=Buckets.of(4), device=device)
    with pytest.raises(KeyError), run.installed(), run.installed():
        raise KeyError
    assert "_compiled_call_impl" not in outer.stack.__dict__


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("same", [False, True])
def test_installations_are_undone_in_any_order(device: Device, order: tuple[int, int], same: bool) -> None:
    outer = Outer(device)
    first, second = (
        graphed(outer.stack, slots=stack_slots(), bucketed="tokens", buckets=Buckets.of(4, 8), device=device)
        for _ in range(2)
    )
    runs = (first, first if same else second)
    hidden = torch.randn(7, 16, device=device.torch_device)
    wanted = outer(hidden, [3, 4])
    installed = [run.installed() for run in runs]
    for one in installed:
        one.__enter__()
    for run in runs:
        run.capture(silent)
    equal(outer(hidden, [3, 4]), wanted)
    assert runs[1].stats.replays.total() == 1
    installed[order[0]].__exit__(None, None, None)
    equal(outer(hidden, [3, 4]), wanted)  # the one that is left serves
    assert runs[order[1]].stats.replays.total() == (2 if same or order == (0, 1) else 1)
    installed[order[1]].__exit__(None, None, None)
    assert "_compiled_call_impl" not in outer.stack.__dict__
    equal(outer(hidden, [3, 4]), wanted)


class TestHooks:
    """A module is called, not its forward: hooks are part of the pass, on every path."""

    def hooked(self, device: Device) -> tuple[Stack, Graphed, torch.Tensor]:
        stack = Stack().to(device.torch_device).requires_grad_(False)
        stack.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"hidden": kwargs["hidden"] + 1}), with_kwargs=True
        )
        stack.register_forward_hook(lambda module, args, out: out * 2)
        stack.layers[1].register_forward_hook(lambda module, args, out: out + 1)
        run = graphed(stack, slots=stack_slots(), bucketed="tokens", buckets=Buckets.of(4, 8), device=device)
        return stack, run, torch.randn(7, 16, device=device.torch_device)

    def test_they_run_before_capture_in_a_replay_and_past_the_largest_bucket(self, device: Device) -> None:
        stack, run, hidden = self.hooked(device)
        equal(run(hidden), stack(hidden=hidden))
        run.capture(silent)
        equal(run(hidden), stack(hidden=hidden))
        equal(run(torch.cat([hidden, hidden])), stack(hidden=torch.cat([hidden, hidden])))
        assert (run.stats.replays.total(), run.stats.eager.total()) == (1, 2)
        assert run.verify().ok

    def test_they_run_once_where_it_is_installed(self, device: Device) -> None:
        stack, run, hidden = self.hooked(device)
        wanted = stack(hidden=hidden)
        with run.installed():
            equal(stack(hidden=hidden), wanted)
            run.capture(silent)
            equal(stack(hidden=hidden), wanted)
        assert (run.stats.replays.total(), run.stats.eager.total()) == (1, 1)

    def test_hooks_for_all_modules_are_recorded(self, device: Device) -> None:
        stack, run, hidden = self.hooked(device)
        with register_module_forward_hook(lambda module, args, out: out * 3 if module is stack else None):
            run.capture(silent)
            equal(run(hidden), stack(hidden=hidden))
            assert run.stats.replays.total() == 1
        equal(run(hidden), stack(hidden=hidden))
        assert run.stats.eager.total() == 1

    def test_a_hook_that_comes_or_goes_after_capture_is_noticed(self, device: Device) -> None:
        stack, run, hidden = self.hooked(device)
        run.capture(silent)
        nn.Linear(1, 1).register_forward_hook(lambda *_: None)  # somebody else's
        equal(run(hidden), stack(hidden=hidden))
        assert run.stats.replays.total() == 1
        handle = stack.layers[2].register_forward_hook(lambda module, args, out: out * 5)
        equal(run(hidden), stack(hidden=hidden))
        assert run.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 1}
        assert "a hook was registered or removed" in run.explain()
        run.capture(silent)
        equal(run(hidden), stack(hidden=hidden))
        handle.remove()
        equal(run(hidden), stack(hidden=hidden))
        assert (run.stats.replays.total(), run.stats.eager.total()) == (2, 2)


@graph_break
def times(x: torch.Tensor, factors: list[float]) -> torch.Tensor:
    return x * factors[0]


@pytest.mark.parametrize("debug", [False, True])
def test_a_gap_is_passed_the_live_argument_of_each_call(device: Device, debug: bool) -> None:
    def scaled(x: torch.Tensor, factor: float = 2.0, d: Any = None) -> torch.Tensor:
        return times(times(x + 1, [factor]), [d["inner"]])

    run = graphed(
        scaled, slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(4), backend="breakable", debug=debug,
        sample=lambda extent, seed: {"x": inputs(device, extent.used["seqs"])["x"], "d": {"inner": 1.0}},
        live=["factor", "d.inner"], device=device,
    )  # fmt: skip
    assert not run.capture(silent).failures
    x = inputs(device, 3)["x"]
    equal(run(x=x, factor=5.0, d={"inner": 3.0}), (x + 1) * 15)
    equal(run(x=x, d={"inner": 4.0}), (x + 1) * 8)
    assert isinstance(run.runner.last, Replay)
    run.verify().raise_if_failed()


@pytest.mark.parametrize(
    "read",
    [
        lambda x, k: x * k,
        lambda x, k: k * x,
        lambda x, k: x[:k] + x if k > 3 else x,
        torch.full_like,
        lambda x, k: x + (1 if isinstance(k, int) else 2),
        lambda x, k: x if {3: 1}.get(k) else -x,
        lambda x, k: x + k.real,
        lambda x, k: x + float(f"{k}"),
        lambda x, k: times(x, [k]),  # recorded with the rest: full has no gaps
        lambda x, k: {"x": x, "k": k},
    ],
)
def test_a_body_that_reads_a_live_argument_is_refused(device: Device, read: Any) -> None:
    run = graphed(
        lambda x, k=3: read(x, k), slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(4), live=["k"], device=device
    )
    assert "the live argument 'k'" in str(run.capture(silent).failures[0].error)


def test_a_captured_tail_that_reads_a_live_argument_is_refused(device: Device) -> None:
    run = graphed(
        lambda x, k=3: x + 1, slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(4), live=["k"], device=device,
        tail=lambda outputs, batch: outputs * batch["k"], tail_captured=True,
    )  # fmt: skip
    assert "reads the live argument 'k'" in str(run.capture(silent).failures[0].error)


@pytest.mark.parametrize(("live", "said"), [("typo", "not an argument"), ("x", "holds the slot 'x'")])
def test_live_names_are_checked(live: str, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        graphed(lambda x, k=3: x, slots=SLOTS[:1], bucketed="seqs", buckets=[4], live=[live], device="emulated")


def test_only_a_module_can_be_installed(device: Device) -> None:
    with pytest.raises(DeclarationError, match=r"only a torch\.nn\.Module"), captured(device).installed():
        pass


def test_prefill_with_many_requests_stays_on_the_graph(device: Device) -> None:
    """The stack is named by the caller; its recording depends on tokens, the tail on requests."""
    outer = Outer(device)

    def tail(hidden: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return torch.stack([part.sum(0) for part in hidden.split(batch["lengths"])])

    def forward(hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out: torch.Tensor = outer.stack(hidden + 1)
        return out

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["tokens"]
        return {"hidden": torch.randn(count, 16, device=device.torch_device), "lengths": [count]}

    run = graphed(
        forward, slots=stack_slots(), bucketed="tokens", buckets=Buckets.of(4, 8), phase="prefill",
        sample=sample, tail=tail, live=["lengths"], device=device,
    )  # fmt: skip
    run.capture(silent)
    assert run.plan.phase("prefill").backend == "breakable"
    for lengths in ([5], [2, 3], [1] * 8):
        hidden = torch.randn(sum(lengths), 16, device=device.torch_device)
        equal(run(hidden=hidden, lengths=lengths), outer(hidden, lengths))
    assert run.stats.replays.total() == 3


def test_a_slot_that_is_no_argument_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"slot 'y' is not an argument of step\(x"):
        graphed(step, slots=[*SLOTS, Slot("y", ("seqs",), torch.float32)], bucketed="seqs", buckets=Buckets.of(2))


def test_an_unknown_backend_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(PlanError, match="breakable"):
        graphed(step, slots=SLOTS, bucketed="seqs", buckets=Buckets.of(2), backend="breakabel")


def test_a_backend_that_the_device_lacks_is_refused() -> None:
    class Older(EmulatedDevice):
        capabilities = Capabilities(backends=frozenset({"full", "disabled"}))

    for backend in ("breakable", "tc_piecewise"):
        with pytest.raises(PlanError, match=backend):
            graphed(step, slots=SLOTS, bucketed="seqs", buckets=Buckets.of(2), backend=backend, device=Older())


def test_a_dotted_source_needs_a_sample() -> None:
    slot = Slot("x", ("seqs", 16), torch.float32, source="inputs.x")
    with pytest.raises(DeclarationError, match="Give sample="):
        graphed(lambda inputs: inputs["x"], slots=[slot], bucketed="seqs", buckets=Buckets.of(2))


def test_host_plan_is_the_callers_and_plan_the_resolved_settings(device: Device) -> None:
    seen: list[int] = []
    run = captured(device, host_plan=lambda batch, extent: seen.append(extent.used["seqs"]))
    seen.clear()
    given = inputs(device, 3)
    equal(run(**given), step(**given))
    assert seen == [3]
    assert run.plan.phase("decode").backend == run.runner.plan.backend == "full"


def test_debug_and_strict_reach_the_plan(device: Device) -> None:
    run = captured(device, debug=True, strict=True)
    assert run.plan["debug"].source == "asked"
    assert run.plan["graphs"].value == "strict"
    with pytest.raises(phonograph.CoverageError):
        run(**inputs(device, 9))


def test_default_samples_stay_inside_valid(device: Device) -> None:
    table = torch.arange(5.0, device=device.torch_device)
    slots = [
        Slot("index", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, 4)),
        Slot("scale", ("seqs",), torch.float32, valid=(0.5, 1.0)),
        Slot("flag", ("seqs",), torch.bool, pad=Pad.fill(False)),
    ]

    def look_up(index: torch.Tensor, scale: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return torch.where(flag, table[index] * scale, scale)

    run = graphed(look_up, slots=slots, bucketed="seqs", buckets=Buckets.of(4), device=device)
    run.capture(silent)
    assert run.verify(batches=4).ok
    sampled = run.runner.phase.sample(Extent({"seqs": 500}, {"seqs": 500}), 3)
    assert set(np.unique(sampled["index"].cpu())) == {1, 2, 3, 4}, "what padding has is left to padding"
    assert 0.5 <= sampled["scale"].min() <= sampled["scale"].max() <= 1.0


def test_arguments_by_position_and_by_name_are_the_same_with_keywords(device: Device) -> None:
    def scaled(x: torch.Tensor, **more: float) -> torch.Tensor:
        return x * more.get("factor", 1.0)

    run = graphed(scaled, slots=SLOTS[:1], bucketed="seqs", buckets=[4], device=device)
    run.capture(silent)
    x = inputs(device, 3)["x"]
    equal(run(x, factor=3.0), x * 3)
    equal(run(x=x, factor=3.0), x * 3)
    assert run.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 2}
    assert run.decide(x, factor=3.0) == run.decide(x=x, factor=3.0)


def test_arguments_without_names_are_refused() -> None:
    for function in (lambda *x: x, lambda x, /: x):
        with pytest.raises(DeclarationError, match="without names"):
            graphed(function, slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(4))


def test_a_slot_that_is_not_given_has_the_functions_default(device: Device) -> None:
    twos = torch.full((4,), 2.0, device=device.torch_device)

    def scaled(x: torch.Tensor, scale: torch.Tensor | None = twos) -> torch.Tensor:
        return x[:, :4] if scale is None else x[:, :4] * scale

    slots = [SLOTS[0], Slot("scale", (4,), torch.float32, absent=1.0)]
    run = graphed(scaled, slots=slots, bucketed="seqs", buckets=Buckets.of(4), device=device)
    run.capture(silent)
    x = inputs(device, 3)["x"]
    equal(run(x), scaled(x))
    equal(run(x, scale=None), x[:, :4])
    assert run.stats.replays.total() == 2


@pytest.mark.parametrize("tail", [None, lambda out, batch: out])
def test_an_argument_that_changes_is_noticed_also_in_place_and_with_a_tail(device: Device, tail: Any) -> None:
    config = [1.0]

    def scaled(x: torch.Tensor, config: list[float] = config) -> torch.Tensor:
        return x * config[0]

    run = graphed(scaled, slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(4), device=device, tail=tail)
    run.capture(silent)
    x = inputs(device, 3)["x"]
    equal(run(x), x)
    equal(run(x, config=[7.0]), x * 7)
    equal(run(x, config=config), x)
    config[0] = 5.0
    equal(run(x, config=config), x * 5)
    assert (run.stats.replays.total(), run.stats.eager.total()) == (2, 2)


def test_outputs_must_be_own_or_view(device: Device) -> None:
    with pytest.raises(DeclarationError, match="'views'"):
        captured(device, outputs="views")


def test_a_value_that_is_given_twice_is_an_error_as_in_python(device: Device) -> None:
    run = captured(device)
    batch = inputs(device, 3)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        run(batch["x"], batch["lens"], x=batch["x"] * 2)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        run.decide(batch["x"], x=batch["x"])


def test_defaults_may_be_arrays(device: Device) -> None:
    table, ones = np.arange(3.0), np.ones(4, dtype=np.float32)

    def scaled(x: torch.Tensor, scale: Any = ones, table: Any = table) -> torch.Tensor:
        return x[:, :4] * scale * len(table)

    slots = [SLOTS[0], Slot("scale", (4,), torch.float32)]
    run = graphed(scaled, slots=slots, bucketed="seqs", buckets=Buckets.of(4), device=device)
    run.capture(silent)
    x = inputs(device, 3)["x"]
    equal(run(x), x[:, :4] * 3)
    equal(run(x, table=table), x[:, :4] * 3)
    assert run.stats.replays.total() == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_are_refused_with_what_to_do(device: Device, copied: Any) -> None:
    run = captured(device)
    holder = nn.Linear(2, 2)
    holder.step = run  # type: ignore[assignment]
    for one in (run, holder) if copied is not copy.copy else (run,):
        with pytest.raises(TypeError, match=r"graphed 'step': .*call graphed\(\) and capture\(\) on that"):
            copied(one)
    with pytest.raises(TypeError, match="make and capture another runner"):
        copied(run.runner)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_what_is_dropped_is_freed_at_once(device: Device, backend: str) -> None:
    weight = torch.ones(16, 16, device=device.torch_device)

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        break_graph()
        return y + 1

    run = graphed(body, slots=SLOTS[:1], bucketed="seqs", buckets=Buckets.of(2, 4), device=device, backend=backend)
    run.capture(silent)
    run(inputs(device, 3)["x"])
    assert run.verify().ok
    held: list[Any] = [weakref.ref(run.runner), weakref.ref(run.runner.recording(run.runner.captured[0]))]
    gc.disable()
    try:
        del run
        assert [one() for one in held] == [None] * 2
    finally:
        gc.enable()


def test_explain_before_capture_saves_nothing_of_nothing(device: Device) -> None:
    run = graphed(step, slots=SLOTS, bucketed="seqs", buckets=Buckets.of(4), device=device)
    assert " bytes, 0 saved by sharing" in run.explain()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one bucket": ({"buckets": 8}, r"Buckets\.up_to\(8\).* or \[8\]"),
    "one slot": ({"slots": SLOTS[0]}, r"graphed\(slots=\): expected a list"),
    "a slot's name": ({"slots": ["x"]}, "expected only Slot items, found 'x'"),
    "one live argument": ({"live": "lens"}, r"Write \['lens'\]"),
    "one slot left out": ({"without": "lens"}, r"Write \['lens'\]"),
    "an unknown slot left out": ({"eager_without": ["length"]}, "its slots are"),
    "padding": ({"max_padding_ratio": "much"}, "max_padding_ratio"),
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_wrong_arguments_are_refused_in_a_sentence(kind: str) -> None:
    given, said = WRONG[kind]
    arguments: dict[str, Any] = {"slots": SLOTS, "bucketed": "seqs", "buckets": Buckets.of(4)} | given
    with pytest.raises((DeclarationError, PlanError), match=said):
        graphed(step, device="emulated", **arguments)


def test_debug_passes_are_no_replays(device: Device) -> None:
    run = captured(device, debug=True)
    run(**inputs(device, 3))
    assert not run.stats.replays
    assert "1 debug: the body runs in the place of step[seqs=4]" in run.explain()


class TestAllOfTheLayer:
    """What a phase and a runner can do, `graphed` can."""

    def test_admission(self, device: Device) -> None:
        def admit(batch: dict[str, Any], key: ShapeKey) -> RunEagerly | None:
            return RunEagerly(Reason.FEATURE_NOT_CAPTURED, "long") if len(batch["x"]) == 2 else None

        run = captured(device, admission=[admit])
        for count in (2, 3):
            run(**inputs(device, count))
        assert (run.stats.replays.total(), run.stats.details) == (1, {Reason.FEATURE_NOT_CAPTURED: "long"})

    def test_adopted_buffers(self, device: Device) -> None:
        buffer = torch.zeros(8, 16, device=device.torch_device)
        run = captured(device, adopt={"x": buffer})
        batch = inputs(device, 3)
        equal(run(**batch), step(**batch))
        equal(buffer[:3], batch["x"])

    def test_padding_limits(self, device: Device) -> None:
        run = graphed(
            step, slots=SLOTS, bucketed="seqs", buckets=[8], device=device, max_padding_ratio=1.5, max_padding_rows=1
        )
        run.capture(silent)
        for count in (3, 7):
            run(**inputs(device, count))
        assert (run.stats.replays.total(), dict(run.stats.eager)) == (1, {Reason.OVER_PADDED: 1})
        assert run.plan["decode.max_padding_rows"].source == "asked"

    def test_slots_left_out(self, device: Device) -> None:
        seen: list[tuple[bool, bool]] = []

        @graph_break
        def look() -> None:
            seen.append(tuple(current().batch[name] is batch[name] for name in ("x", "lens")))  # type: ignore[arg-type]

        def body(x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
            look()
            return x * 2

        run = graphed(
            body, slots=SLOTS, bucketed="seqs", buckets=[4], device=device, backend="breakable",
            without=["lens"], eager_without=["x"], eager_copies=True,
        )  # fmt: skip
        batch = inputs(device, 3)
        run.capture(silent)
        seen.clear()
        equal(run(**batch), batch["x"] * 2)
        batch = inputs(device, 5)
        equal(run(**batch), batch["x"] * 2)
        assert seen == [(False, True), (True, False)]

    def test_a_barrier_a_captured_tail_and_garbage(self, device: Device) -> None:
        calls: list[None] = []
        run = graphed(
            step, slots=SLOTS, bucketed="seqs", buckets=[4], device=device, barrier=lambda: calls.append(None),
            tail=lambda out, batch: out + 1, tail_captured=True, collect_garbage=True,
        )  # fmt: skip
        run.capture(silent)
        assert calls
        assert run.runner.options.collect_garbage
        batch = inputs(device, 3)
        equal(run(**batch), step(**batch) + 1)
        assert not run.runner.recording(run.runner.captured[0]).has_gaps

    def test_functions_of_one_pool_share_graph_memory_and_others_do_not(self, device: Device) -> None:
        pool = BufferPool(device)
        runs = [
            graphed(body, slots=SLOTS, bucketed="seqs", buckets=[2, 4], device=device, pool=pool)
            for body in (step, lambda x, lens: (x + 1) * lens[:, None] * 3)
        ]
        for run in runs:
            run.capture(silent)
        for count in (3, 1, 4, 2):
            batch = inputs(device, count)
            equal(runs[0](**batch), step(**batch))
            equal(runs[1](**batch), (batch["x"] + 1) * batch["lens"][:, None] * 3)
        assert runs[0].runner.memory is runs[1].runner.memory
        assert captured(device).runner.memory is not runs[0].runner.memory
        assert all(run.verify().ok for run in runs)
