"""graphed: the graph layer for any PyTorch callable, in a few lines."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from phonograph.devices import Device, open_device
from phonograph.errors import DeclarationError, VerifyError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.fields import path_of
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.phases.decisions import Decision, Stats
from phonograph.graphs.phases.live_arguments import Live
from phonograph.graphs.phases.phase import Admission, Phase, Preserve, SampleFunction
from phonograph.graphs.planning.kinds import GuardMode, unknown
from phonograph.graphs.planning.resolve import Plan, resolve
from phonograph.graphs.planning.settings import KNOWN_PHASES, Ask, ask
from phonograph.graphs.progress import Progress
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.recording.facts import WatchedFacts
from phonograph.graphs.recording.modules import ModuleCall
from phonograph.graphs.running.installation import installed
from phonograph.graphs.running.other_arguments import OtherArguments, sample_of_slots, unchanged_hooks
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.running.runner_options import FactsOption, Outputs, facts_of, options_of
from phonograph.graphs.trust.verify import VerifyReport, verify

log = logging.getLogger("phonograph")


class Graphed:
    """A callable whose calls are replays where a recording fits. Made by `graphed`."""

    def __init__(
        self,
        function: Callable[..., Any],
        runner: Runner,
        plan: Plan,
        phase: str,
        signature: inspect.Signature,
        *,
        verifies: bool = False,
    ) -> None:
        self._function = function
        self._phase = phase
        self._signature = signature
        self._names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._slot_defaults = {
            slot.path[0]: signature.parameters[slot.path[0]].default
            for slot in runner.phase.slots
            if slot.path[0] in signature.parameters and _has_value(signature.parameters[slot.path[0]])
        }
        self.runner = runner
        self._verifies = verifies
        self.plan = plan
        """The resolved settings of the phase, each with its reason."""
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.run(self._arguments(args, kwargs))

    def capture(self, progress: Progress | None = None, *, verify: bool | None = None) -> CaptureReport:
        """Record every bucket; with `verify`, check them all too, and raise where a replay is wrong.

        Calls then run eagerly. The default is what `graphed` was told.
        """
        report = self.runner.capture(progress)
        if self._verifies if verify is None else verify:
            try:
                self.verify().raise_if_failed()
            except VerifyError:
                self.release()
                raise
        return report

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """What a call with these arguments would run."""
        return self.runner.decide(self._arguments(args, kwargs))

    def size_of(self, dim: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """How much of a dim a call with these arguments uses."""
        return self.runner.registry.size_of(dim, self._arguments(args, kwargs), {})

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; a slot that is not given has the function's default."""
        if args:
            named = dict(zip(self._names, args, strict=False))
            if len(args) > len(self._names) or not named.keys().isdisjoint(kwargs):
                self._signature.bind(*args, **kwargs)  # raises as the function would
            kwargs = named | kwargs
        return self._slot_defaults | kwargs if self._slot_defaults else kwargs

    def explain(self) -> str:
        """The plan, what is captured, counts, and the reason of each eager call."""
        return f"{self.plan.explain()}\n{self.runner.explain()}"

    def verify(self, *, batches: int = 2, seed: int = 0, tolerance: float | None = None) -> VerifyReport:
        """Check every recording on random valid batches."""
        report = verify(self.runner, batches=batches, seed=seed, tolerance=tolerance)
        self.runner.verified = report.verified
        if report.failures:
            log.warning("%s: what is wrong is replayed until it is released: %s", _name_of(self._function), report)
        return report

    @property
    def stats(self) -> Stats:
        return self.runner.stats

    def facts(self) -> WatchedFacts:
        """What the recordings assume besides their slots, as far as the bytecode that ran shows it."""
        return self.runner.facts

    def refresh(self, progress: Progress | None = None) -> CaptureReport:
        """Record again if one of the facts has changed."""
        return self.runner.refresh(progress)

    def release(self) -> None:
        """Free the graphs; calls run eagerly from then on."""
        self.runner.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = _name_of(self._function)
        raise TypeError(
            f"copying or pickling graphed {name!r}: graphs and their buffers stay where they were made. Copy or pickle "
            "what was graphed (__wrapped__), and call graphed() and capture() on that. A module that holds a graphed "
            "one as an attribute can be copied before it gets it."
        )

    @contextmanager
    def installed(self) -> Iterator[Graphed]:
        """Serve calls of the module that was graphed, while the code around it runs eagerly; undone at the end.

        Its hooks are part of what is recorded, and are not run a second time. Calls of its `forward` are not served.
        Where several are installed on one module, the latest serves; they may be undone in any order.
        """
        module = self._function
        if not isinstance(module, torch.nn.Module):
            raise DeclarationError(
                f"installing {_name_of(module)!r}: only a torch.nn.Module can be installed. "
                "Pass the module to graphed()."
            )
        with installed(module, self):
            yield self


def graphed(  # noqa: PLR0913 - the front door names every choice
    function: Callable[..., Any],
    *,
    slots: Sequence[Slot],
    bucketed: str,
    buckets: Buckets | Sequence[int],
    dims: Sequence[Dim] = (),
    live: Collection[str] = (),
    phase: str = "decode",
    backend: str | None = None,
    tc_compiler: str | None = None,
    tc_fallback: bool | None = None,
    break_ops: Collection[str] = (),
    device: str | torch.device | Device | None = None,
    outputs: Outputs = "own",
    sample: SampleFunction | None = None,
    tail: Callable[[Any, Any], Any] | None = None,
    host_plan: Callable[[Any, Extent], None] | None = None,
    tail_captured: bool = False,
    preserve: Preserve | None = None,
    admission: Sequence[Admission] = (),
    adopt: Mapping[str, torch.Tensor] | None = None,
    without: Collection[str] = (),
    eager_without: Collection[str] = (),
    pool: BufferPool | None = None,
    max_padding_ratio: float | None = None,
    max_padding_rows: int | None = None,
    strict: bool = False,
    debug: bool = False,
    eager_copies: bool = False,
    collect_garbage: bool = False,
    barrier: Callable[[], None] | None = None,
    facts: FactsOption = "check",
    ignore: Collection[str] = (),
    guard: GuardMode | None = None,
    smallest: int = 1,
    verify: bool = False,
) -> Graphed:
    """Serve calls of a function or module by recorded graphs.

    A module is called as its users call it, with its hooks. The function is called with its slots by name; other
    arguments are passed on as they are. In a recording they keep the value that the sample has, so a call with another
    value runs eagerly, unless the argument is `live`. Nothing is recorded before `.capture()`.

    Args:
        function: what computes a step: a function, a method or a `torch.nn.Module`.
        slots: its inputs, one `Slot` for each tensor argument.
        bucketed: the dim whose size picks the recording.
        buckets: the sizes that get a recording; a call is padded to the next one.
        dims: limits of the other dims, or how they follow from the bucketed one.
        live: arguments (`"a"`, or `"a.b"` for a field of one) that gaps, and a tail that is not recorded, get as each
            call has them; capture refuses a body that reads one anywhere else. It can't see an `is` test: don't ask
            whether a live argument is None outside of a gap.
        phase: picks the defaults of the plan: `full` for decode, `breakable` for prefill.
        backend: `full`, `breakable`, `tc_piecewise` or `disabled`.
        tc_compiler: what compiles the pieces of `tc_piecewise`: `inductor`, the default where the device takes it, or
            `eager`.
        tc_fallback: record shapes that torch.compile can't trace as `breakable` does.
        break_ops: ops that `tc_piecewise` breaks at too, by name.
        device: where it runs; default: that of the function's parameters, else the accelerator present.
        outputs: `own` returns tensors of the call's own; `view` the graph's, valid until the next call.
        sample: takes an extent and a seed, makes a valid batch, of your own data if you like: trial runs and `verify`
            run on these. Default: random, made from the slots.
        tail: takes the used rows of the function's outputs and the live arguments; runs after a replay.
        host_plan: host work between load and replay, outside the graph.
        tail_captured: record the tail too; it then gets padded rows.
        preserve: saves and restores the state that trial runs touch; default: found by running the function.
        admission: rules that may refuse a recording to a batch, with the reason.
        adopt: existing tensors to use as input buffers, by slot.
        without: slots that graphs leave out.
        eager_without: slots that eager calls leave out.
        pool: functions that are given one share input buffers and graph memory, and serve one call at a time.
        max_padding_ratio: with `max_padding_rows`, how much padding is still replayed.
        max_padding_rows: padding up to this many rows is always replayed.
        strict: a call that no graph can serve is an error.
        debug: run the function itself in the place of every replay.
        eager_copies: eager calls copy their inputs into buffers, as replays do.
        collect_garbage: let the garbage collector run during capture.
        barrier: called after every warm-up and capture, where ranks must stay together.
        facts: when to check what recordings took for granted: `check` at every call, `verify`, or `off`.
        ignore: facts and Python state that don't matter, by dotted name.
        guard: a shape whose ops depend on the sample: `refuse` it, `report` it, or `off`.
        smallest: batches of fewer rows are not tried at capture, and run eagerly.
        verify: `capture()` also checks every recording, and raises where a replay is wrong.
    """
    slots, live = _all_of(Slot, slots, "slots"), _all_of(str, live, "live")
    on, buckets = _opened(device, function), _as_buckets(buckets)
    call = ModuleCall(function) if isinstance(function, torch.nn.Module) else function
    asked = {
        f"{phase}.backend": ("backend", backend),
        f"{phase}.max_padding_ratio": ("max_padding_ratio", max_padding_ratio),
        f"{phase}.max_padding_rows": ("max_padding_rows", max_padding_rows),
        "graphs": ("strict", "strict" if strict else None),
        "guard": ("guard", guard),
        "tc_compiler": ("tc_compiler", tc_compiler),
        "tc_fallback": ("tc_fallback", tc_fallback),
        "debug": ("debug", debug or None),
        "gc": ("collect_garbage", collect_garbage or None),
    }
    resolved = resolve(_asks(phase, buckets, asked), facts_of(on, function), [KNOWN_PHASES[phase]])
    signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    _check_arguments(signature, slots, _name_of(function))
    others = OtherArguments(signature, slots, lives := _lives(signature, slots, live, _name_of(function)), function)
    declared = Phase(
        name=_name_of(function),
        slots=tuple(slots),
        bucketed=bucketed,
        body=lambda batch: call(**batch),
        sample=sample if sample is not None else sample_of_slots(signature, slots, on, _name_of(function)),
        dims=(dims,) if isinstance(dims, Dim) else tuple(dims),
        smallest=smallest,
        tail=tail,
        tail_captured=tail_captured,
        host_plan=host_plan,
        preserve=preserve,
        admission=[others.admit, *([unchanged_hooks(call)] if isinstance(call, ModuleCall) else ()), *admission],
        without=frozenset(_all_of(str, without, "without")),
        eager_without=frozenset(_all_of(str, eager_without, "eager_without")),
        adopt=adopt or {},
        compares_others=True,
        live=lives,
        break_ops=frozenset(_all_of(str, break_ops, "break_ops")),
    )
    options = replace(
        options_of(resolved),
        outputs=outputs,
        strict=strict,
        eager_copies=eager_copies,
        barrier=barrier,
        facts=facts,
        ignore=_all_of(str, ignore, "ignore"),
    )
    runner = Runner(declared, on, resolved.phase(phase), pool=pool, options=options)
    others.carried = weakref.WeakMethod(runner.carried)
    return Graphed(function, runner, resolved, phase, signature, verifies=verify)


def _asks(phase: str, buckets: Buckets, asked: Mapping[str, tuple[str, Any]]) -> list[Ask]:
    """The plan settings that arguments of `graphed` set: the argument's name, and its value if one is given."""
    if phase not in KNOWN_PHASES:
        raise unknown("phase", phase, tuple(KNOWN_PHASES), "graphed(phase=)")
    given = {f"{phase}.buckets": ("buckets", buckets.sizes), f"{phase}.exact": ("buckets", buckets.exact), **asked}
    return [ask(name, value, origin=f"graphed({word}=)") for name, (word, value) in given.items() if value is not None]


def _as_buckets(buckets: Buckets | Sequence[int]) -> Buckets:
    if isinstance(buckets, int):
        raise DeclarationError(
            f"graphed(buckets={buckets}): expected several sizes, found one number. "
            f"Write Buckets.up_to({buckets}) for every size up to it, or [{buckets}]."
        )
    return buckets if isinstance(buckets, Buckets) else Buckets(tuple(buckets))


T = TypeVar("T")


def _all_of(kind: type[T], given: Collection[T], argument: str) -> tuple[T, ...]:
    """A sequence argument of `graphed` as a tuple, its items' type checked."""
    if isinstance(given, kind):
        raise DeclarationError(f"graphed({argument}=): expected a list, found {given!r} alone. Write [{given!r}].")
    several = tuple(given)
    wrong = next((one for one in several if not isinstance(one, kind)), None)
    if wrong is not None:
        raise DeclarationError(
            f"graphed({argument}=): expected only {kind.__name__} items, found {wrong!r}. Replace or remove it."
        )
    return several


def _has_value(parameter: inspect.Parameter) -> bool:
    return parameter.default is not None and parameter.default is not inspect.Parameter.empty


def _check_arguments(signature: inspect.Signature, slots: Sequence[Slot], name: str) -> None:
    """Refuse a slot that the function can't be called with."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise DeclarationError(
            f"graphing {name}{signature}: it takes arguments without names, and slots are passed by name. "
            "Wrap it in a function that names them."
        )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for slot in slots:
        if slot.field.split(".")[0] not in signature.parameters:
            raise DeclarationError(
                f"slot {slot.name!r} is not an argument of {name}{signature}. "
                "Rename it, or give source= the argument's name."
            )


def _lives(signature: inspect.Signature, slots: Sequence[Slot], live: Sequence[str], name: str) -> tuple[Live, ...]:
    """The live arguments with their defaults; refused where the function can't be called with one."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    lives: list[Live] = []
    for field in live:
        path = path_of(field)
        parameter = signature.parameters.get(path[0])
        if parameter is None and not takes_all:
            raise DeclarationError(f"live={field!r} is not an argument of {name}{signature}. Correct the name.")
        held = next((slot for slot in slots if slot.path[: len(path)] == path), None)
        if held is not None:
            raise DeclarationError(
                f"live={field!r} is or holds the slot {held.name!r}, which every replay loads. Name what is live "
                f"in it: live=['{path[0]}.field'], or leave it out."
            )
        given = parameter is not None and parameter.default is not parameter.empty and len(path) == 1
        lives.append(Live(field, parameter.default) if parameter is not None and given else Live(field))
    return tuple(lives)


def _device_of(function: Callable[..., Any]) -> torch.device | None:
    """The device of the parameters of a module, or of the module that a method belongs to."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        parameter = next(owner.parameters(), None)
        return parameter.device if parameter is not None else None
    return None


def _name_of(function: Callable[..., Any]) -> str:
    name: Mapping[str, Any] | str = getattr(function, "__name__", type(function).__name__)
    return "graphed" if name == "<lambda>" else str(name)


@functools.cache
def _warn_emulated() -> None:
    log.warning(
        "graphed: no accelerator here, so graphs are emulated on the CPU: right for development and tests, not fast. "
        "Pass device='cuda' on a GPU machine, or device='emulated' to say that this is meant."
    )


def _opened(device: str | torch.device | Device | None, function: Callable[..., Any]) -> Device:
    """The named device, or the function's own; warns once if graphs are emulated without having been asked for."""
    found = open_device(device if device is not None else _device_of(function))
    if found.name == "emulated" and device is None:
        _warn_emulated()
    return found
