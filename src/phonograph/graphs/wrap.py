"""graphed: the graph layer for any PyTorch callable, in a few lines."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from phonograph.devices import Device, open_device
from phonograph.errors import DeclarationError
from phonograph.graphs.backends import BACKENDS
from phonograph.graphs.buckets import Buckets
from phonograph.graphs.capture_report import CaptureReport
from phonograph.graphs.config import Ask, ask
from phonograph.graphs.decisions import Decision, Reason, RunEagerly, ShapeKey, Stats
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.phase import Phase, Preserve, Sampler, sample_from
from phonograph.graphs.pool import BufferPool
from phonograph.graphs.progress import Progress
from phonograph.graphs.resolve import Plan, resolve
from phonograph.graphs.rules import Facts
from phonograph.graphs.runner import Outputs, Runner, RunnerOptions
from phonograph.graphs.slots import Slot
from phonograph.graphs.snapshots import snapshot
from phonograph.graphs.verify import VerifyReport, verify

log = logging.getLogger("phonograph")


class Graphed:
    """A callable whose calls are replays where a recording fits. Made by `graphed`."""

    def __init__(
        self, function: Callable[..., Any], runner: Runner, plan: Plan, phase: str, signature: inspect.Signature
    ) -> None:
        self._function = function
        self._phase = phase
        self._signature = signature
        self._names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._slot_defaults = {
            slot.path[0]: signature.parameters[slot.path[0]].default
            for slot in runner.phase.slots
            if slot.path[0] in signature.parameters
            and signature.parameters[slot.path[0]].default not in (None, inspect.Parameter.empty)
        }
        self.runner = runner
        self.plan = plan
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.run(self._arguments(args, kwargs))

    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Record every bucket."""
        return self.runner.capture(progress)

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """What a call with these arguments would run."""
        return self.runner.decide(self._arguments(args, kwargs))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; a slot that is not given has the function's default."""
        if args:
            kwargs = dict(zip(self._names, args, strict=False)) | kwargs
            if len(args) > len(self._names):
                self._signature.bind(*args)  # raises as the function would
        return self._slot_defaults | kwargs if self._slot_defaults else kwargs

    def explain(self) -> str:
        """The plan, what is captured, counts, and the reason of each eager call."""
        return f"{self.plan.explain(phases=[self._phase])}\n{self.runner.explain()}"

    def verify(self, *, batches: int = 2, seed: int = 0, tolerance: float | None = None) -> VerifyReport:
        """Check every recording on random valid batches."""
        return verify(self.runner, batches=batches, seed=seed, tolerance=tolerance)

    @property
    def stats(self) -> Stats:
        return self.runner.stats

    def release(self) -> None:
        """Give the graphs back; calls run eagerly from then on."""
        self.runner.release()

    @contextmanager
    def installed(self) -> Iterator[Graphed]:
        """Serve the module that was graphed from here while the code around it runs eagerly; undone at the end."""
        module = self._function
        if not isinstance(module, torch.nn.Module):
            raise DeclarationError(
                f"installing {_name_of(module)!r}: only a torch.nn.Module can be installed. "
                "Pass the module to graphed()."
            )
        before = module.__dict__.get("forward")
        module.forward = self
        try:
            yield self
        finally:
            if before is None:
                del module.forward
            else:
                module.forward = before


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
    device: str | torch.device | Device | None = None,
    outputs: Outputs = "own",
    sample: Sampler | None = None,
    tail: Callable[[Any, Any], Any] | None = None,
    plan: Callable[[Any, Extent], None] | None = None,
    preserve: Preserve | None = None,
    pool: BufferPool | None = None,
    strict: bool = False,
    debug: bool = False,
    eager_copies: bool = True,
) -> Graphed:
    """Serve calls of a function or module by recorded graphs.

    The function is called with its slots by name; other arguments are passed on as they are. In a recording
    they keep the value that the sample has, so a call with another value runs eagerly, unless the argument is
    named `live`: only gaps and the tail read it. A `tail` takes the used rows of the function's outputs
    and the live arguments, and is never recorded. `phase` picks the defaults of the plan (`full` for
    decode, `breakable` for prefill). Nothing is recorded before `.capture()`.
    """
    on = open_device(device if device is not None else _device_of(function))
    _say_once_if_emulated(on, asked=device is not None)
    buckets = buckets if isinstance(buckets, Buckets) else Buckets(tuple(buckets))
    call = function.forward if isinstance(function, torch.nn.Module) else function
    resolved = resolve(_asks(phase, buckets, backend, strict=strict, debug=debug), facts_of(on))
    signature = inspect.signature(call)
    _check_arguments(signature, slots, _name_of(function))
    declared = Phase(
        name=_name_of(function),
        slots=tuple(slots),
        bucketed=bucketed,
        body=lambda batch: call(**batch),
        sample=sample if sample is not None else sample_from(slots, on.torch_device),
        dims=tuple(dims),
        tail=tail,
        plan=plan,
        preserve=preserve,
    )
    others = _Others(signature, slots, live)
    declared = replace(declared, admission=[others.admit])
    options = RunnerOptions(outputs=outputs, strict=strict, debug=resolved.debug, eager_copies=eager_copies)
    runner = Runner(declared, on, resolved.phase(phase), pool=pool, options=options)
    others.runner = runner
    return Graphed(function, runner, resolved, phase, signature)


def _asks(phase: str, buckets: Buckets, backend: str | None, *, strict: bool, debug: bool) -> list[Ask]:
    """What the arguments of `graphed` ask of the plan."""
    asked = [
        ask(f"{phase}.buckets", buckets.sizes, origin="graphed(buckets=)"),
        ask(f"{phase}.exact", buckets.exact, origin="graphed(buckets=)"),
    ]
    if backend is not None:
        asked.append(ask(f"{phase}.backend", backend, origin="graphed(backend=)"))
    if strict:
        asked.append(ask("graphs", "strict", origin="graphed(strict=)"))
    if debug:
        asked.append(ask("debug", True, origin="graphed(debug=)"))
    return asked


class _Others:
    """The arguments that are no slots: a recording has them frozen in, so a call with others runs eagerly.

    Only those named `live`, which just gaps and the tail read, may change.
    """

    def __init__(self, signature: inspect.Signature, slots: Sequence[Slot], live: Collection[str]) -> None:
        self._left_out = {slot.path[0] for slot in slots} | set(live)
        self._defaults = {
            name: snapshot(parameter.default)
            for name, parameter in signature.parameters.items()
            if name not in self._left_out and parameter.default is not inspect.Parameter.empty
        }
        self.runner: Runner | None = None

    def admit(self, batch: dict[str, Any], key: ShapeKey) -> RunEagerly | None:
        """Refuse a replay that would not see an argument."""
        if self.runner is None:
            return None
        carried = self.runner.carried(key)
        if not carried and batch.keys() <= self._left_out:
            return None  # nothing but defaults, then and now
        given = self._defaults | {name: snapshot(v) for name, v in batch.items() if name not in self._left_out}
        recorded = self._defaults | {name: v for name, v in carried.items() if name not in self._left_out}
        for name in given.keys() | recorded.keys():
            if name not in given or name not in recorded or given[name] != recorded[name]:
                detail = f"the argument {name!r} differs from what {key} was captured with. Make it a slot"
                return RunEagerly(Reason.FEATURE_NOT_CAPTURED, detail)
        return None


def _check_arguments(signature: inspect.Signature, slots: Sequence[Slot], name: str) -> None:
    """Refuse a slot that the function can't be called with."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise DeclarationError(
            f"{name}{signature} takes arguments without names, and slots are passed by name. "
            "Wrap it in a function that names them."
        )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for slot in slots:
        if slot.field.split(".")[0] not in signature.parameters:
            raise DeclarationError(
                f"slot {slot.name!r} is no argument of {name}{signature}. "
                "Rename it, or give source= the argument's name."
            )


def facts_of(device: Device) -> Facts:
    """What rules may know about a device and this build."""
    can = device.capabilities
    return Facts(
        device=device.name,
        backends=can.backends,
        built=frozenset(BACKENDS),
        shares_buffers=can.shares_buffers,
        releases_memory=can.releases_memory,
        features=frozenset(),
    )


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


def _say_once_if_emulated(device: Device, *, asked: bool) -> None:
    if device.name == "emulated" and not asked:
        _warn_emulated()
