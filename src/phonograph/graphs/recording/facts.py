"""Facts: what the recordings of a phase took for granted besides their slots, found by watching two free warm-ups.

A value is a fact if both runs of a shape read it in one place: what only one run has is a temporary of that run. The
facts of all shapes together hold for all of them.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from phonograph.errors import Frame
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.recording import frame_memory
from phonograph.graphs.recording.contents import tensors_in
from phonograph.graphs.recording.fact import (
    FUNCTION_PARTS,
    AddressOf,
    AllItems,
    ClassOf,
    Fact,
    FactKind,
    HooksOf,
    InDict,
    InList,
    OfFunction,
    Source,
    address_of,
    unchanged,
)
from phonograph.graphs.recording.fact_check import FactCheck
from phonograph.graphs.recording.functions import Functions
from phonograph.graphs.recording.late_reads import LateReads
from phonograph.graphs.recording.modes import mode_facts
from phonograph.graphs.recording.ownership import is_installed
from phonograph.graphs.recording.places import ABSENT
from phonograph.graphs.recording.reads import CONTAINERS_OF_MODULES, Reads
from phonograph.graphs.recording.tracing import TracingUnavailableError

AroundGap = Callable[[], AbstractContextManager[None]]
_MAX_FACTS_SHOWN = 40
_MAX_LEFT_OUT = 4
MAX_SECONDS = 20.0
"""After so long, shapes between the largest and the smallest are no longer watched: a watched run takes fifty times
as long as another."""


@dataclass(frozen=True)
class WatchedFacts:
    """What is watched."""

    facts: tuple[Fact, ...] = ()
    method: str = ""
    """How it is checked."""
    notes: tuple[str, ...] = ()
    """What is not watched, and why."""
    stale: Fact | None = None
    """The fact that did not hold in the last check."""

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def summary(self) -> str:
        """How many of each kind."""
        counts = Counter(fact.kind for fact in self.facts)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"{len(self.facts)} facts ({kinds})" if self.facts else "no facts"

    def __str__(self) -> str:
        lines = [self.summary, *([f"  checked by {self.method}"] if self.method else [])]
        lines += [f"  stale: {self.stale.change}"] if self.stale is not None else []
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {fact}" for fact in self.facts[:_MAX_FACTS_SHOWN]]
        more = len(self.facts) - _MAX_FACTS_SHOWN
        return "\n".join([*lines, *([f"  … and {more} more"] if more > 0 else [])])


@dataclass(eq=False)
class FactRecorder:
    """Watches the warm-ups of some shapes of a phase."""

    roots: Sequence[Any]
    keys: Sequence[ShapeKey]
    """The shapes that are watched."""
    ignored: Sequence[str] = ()
    alone: bool = False
    """Whether the first of them that runs twice speaks for all."""
    problem: str = ""
    """Why reads can't be recorded, or nothing."""
    late_reads: LateReads = field(default_factory=LateReads)
    _functions: Functions = field(default_factory=Functions)
    _first: dict[ShapeKey, Reads] = field(default_factory=dict)
    _read: dict[ShapeKey, Reads] = field(default_factory=dict)
    """What both runs of a shape read, as the second found it."""
    _seconds: float = 0.0
    """How long the runs that were watched took."""
    _left_out: set[ShapeKey] = field(default_factory=set)
    _paths: dict[int, str] = field(default_factory=dict)
    """By identity of a module, or of a dict of one, the path to it."""

    @contextmanager
    def watching(self, key: ShapeKey, around_gap: AroundGap = nullcontext) -> Iterator[AroundGap]:
        """Note what is read in here; comes out with what must be entered around every gap."""
        if not self._is_asked(key) or self.problem or not self._can_record():
            yield around_gap
            return
        for root in self.roots:
            self._functions.learn(root)
        reads = Reads(self._functions)

        @contextmanager
        def around() -> Iterator[None]:
            with reads.paused(), around_gap():
                yield

        begin = time.perf_counter()
        with ExitStack() as stack:
            try:
                stack.enter_context(reads.recording())
            except TracingUnavailableError as error:
                self.problem = str(error)
            try:
                yield around
            except BaseException:
                self.give_up(key)
                raise
            finally:
                self._seconds += time.perf_counter() - begin
        if key not in self._first:
            self._first[key] = reads
        else:
            reads.keep_what_is_in(self._first.pop(key))  # temporaries may hold device memory
            self._read[key] = reads

    def give_up(self, key: ShapeKey) -> None:
        """A shape has failed: where one that runs twice speaks for all, it is the next."""
        self._first.pop(key, None)

    def lacks(self, key: ShapeKey) -> bool:
        """Whether a shape that is watched has run only once."""
        return key in self._first

    def _is_asked(self, key: ShapeKey) -> bool:
        if key in self._read or key not in self.keys:
            return False
        if self.alone:
            return not self._read and (not self._first or key in self._first)
        sizes = [one.size for one in self.keys if one.group == key.group]
        if key.size in (max(sizes), min(sizes)) or key in self._first or self._seconds < MAX_SECONDS:
            return True
        self._left_out.add(key)
        return False

    def _can_record(self) -> bool:
        if not records_reads():
            self.problem = "on this Python the recorder does not find the reads of a function that is known"
        return not self.problem

    def settled(self, device: str, recorded: Collection[ShapeKey]) -> Settlement:
        """What was found and holds now, with its check. Where shapes that are recorded were watched, theirs alone."""
        if not self._read.keys().isdisjoint(recorded):
            self._read = {key: reads for key, reads in self._read.items() if key in recorded}
        found: dict[tuple[Any, ...], Fact] = {}
        read, unsteady = self._of_values()
        self._name_by_paths()
        for fact in (*mode_facts(device), *read, *self._of_modules(), *self._of_functions()):
            found.setdefault(fact.source.identity, self._named(fact))
        for fact in list(found.values()):
            for tensor in tensors_in(fact.value):
                if (address := address_of(tensor)) is not None:
                    source = AddressOf(tensor)
                    found.setdefault(source.identity, replace(fact, kind="address", source=source, value=address))
        whole = {id(fact.source.holder) for fact in found.values() if isinstance(fact.source, AllItems)}
        kept = [fact for fact in found.values() if not fact.is_named(self.ignored) and not _is_in(fact, whole)]
        unsteady += [fact.name for fact in kept if fact.differs]
        notes = [f"no values that the body reads: {self.problem}"] if self.problem else []
        if not frame_memory.are_known():
            notes.append("the frames of this Python are not known: what is read of results of calls may not be seen")
        if unsteady:
            notes.append(f"not watched, since warm-ups of other shapes change them: {', '.join(sorted(set(unsteady)))}")
        if self._left_out:
            some = ", ".join(map(str, sorted(self._left_out, key=str)[:_MAX_LEFT_OUT]))
            more = f" and {len(self._left_out) - _MAX_LEFT_OUT} more" if len(self._left_out) > _MAX_LEFT_OUT else ""
            notes.append(f"not looked at, after {self._seconds:.0f} s for other shapes: what only {some}{more} read")
        if self.ignored:
            notes.append(f"ignored: {', '.join(self.ignored)}")
        check = FactCheck([fact for fact in kept if not fact.differs], self._stored_into())
        return Settlement(check, tuple(notes), self.late_reads)

    def _of_values(self) -> tuple[list[Fact], list[str]]:
        """The values that were read, and the names of those that shapes differ in."""
        found: dict[tuple[Any, ...], Fact] = {}
        unsteady: dict[tuple[Any, ...], str] = {}
        for reads in self._read.values():
            for identity, fact in reads.facts.items():
                known = found.setdefault(identity, fact)
                if not unchanged(known.value, fact.value):
                    unsteady[identity] = fact.name
        return [fact for identity, fact in found.items() if identity not in unsteady], list(unsteady.values())

    def _of_modules(self) -> Iterator[Fact]:
        """Parameters, buffers and hooks of the modules whose code ran."""
        names = self._paths
        modules = {one: met for reads in self._read.values() for one, met in reads.modules.items()}
        if modules:
            yield _fact("hooks", "hooks of all modules", HooksOf(None), None)
        for module, frame in modules.values():
            name = names[id(module)]
            yield _fact("hooks", f"hooks of {name}", HooksOf(module), frame)
            yield _fact("class", f"the class of {name}", ClassOf(module), frame)
            for held in (module._parameters, module._buffers):
                if isinstance(held, dict):
                    yield from (_fact("tensor", f"{name}.{key}", InDict(held, key), frame) for key in held)
                else:  # of a scripted module, whose tensors lie in C++
                    yield from (_fact("address", f"{name}.{key}", AddressOf(one), frame) for key, one in held.items())
            if isinstance(module, CONTAINERS_OF_MODULES):
                yield _fact("items", name, AllItems(module._modules), frame)

    def _name_by_paths(self) -> None:
        """Learn the paths of modules and of what they hold from the first that was met above them."""
        for reads in self._read.values():
            for module, _ in reads.modules.values():
                if id(module) in self._paths:
                    continue
                for path, below in module.named_modules(prefix=type(module).__name__):
                    self._paths.setdefault(id(below), path)
                    for held in (vars(below), below._parameters, below._buffers, below._modules):
                        self._paths.setdefault(id(held), path)

    def _named(self, fact: Fact) -> Fact:
        """The same fact, named by the path to its module."""
        source = fact.source
        if not isinstance(source, InDict | AllItems) or id(source.holder) not in self._paths:
            return fact
        path = self._paths[id(source.holder)]
        return replace(fact, name=f"{path}.{source.key}" if isinstance(source, InDict) else path, short=fact.name)

    def _of_functions(self) -> Iterator[Fact]:
        """Code and defaults of the functions that ran."""
        for reads in self._read.values():
            for function, frame in reads.called.values():
                for part in FUNCTION_PARTS:
                    if part == "__code__" or getattr(function, part):
                        yield _fact("default", f"{function.__qualname__}.{part}", OfFunction(function, part), frame)

    def _stored_into(self) -> set[int]:
        """Globals of modules that are not installed: notebooks and scripts store into theirs all the time."""
        return {
            id(fact.source.holder)
            for reads in self._read.values()
            for fact in reads.facts.values()
            if isinstance(fact.source, InDict) and fact.kind == "global" and not is_installed(fact.source.holder)
        }


@dataclass(frozen=True)
class Settlement:
    """The check of a phase's facts, and what is to be said about them."""

    check: FactCheck
    notes: tuple[str, ...] = ()
    late_reads: LateReads = field(default_factory=LateReads)

    @property
    def facts(self) -> WatchedFacts:
        return WatchedFacts(self.check.facts, self.check.method, self.notes, self.check.stale)


def _is_in(fact: Fact, whole: set[int]) -> bool:
    """Whether an item lies in one of the lists that are looked at as a whole."""
    return isinstance(fact.source, InList) and id(fact.source.holder) in whole


def _fact(kind: FactKind, name: str, source: Source, frame: Frame | None) -> Fact:
    return Fact(kind, name, source, source.get(), name, frame)


_TOY_GLOBAL = 2


class _Toy:
    scale = 3

    def __init__(self) -> None:
        self.offset = 1
        self.sizes = {"one": 1}
        self.parts: list[_Toy] = []


def _toy_function() -> Callable[[], int]:
    toy, cell = _Toy(), 4
    toy.parts.append(toy)

    def run() -> int:
        one = toy
        sizes = one.sizes
        offset = getattr(one, "offset")  # noqa: B009
        return sum([part.scale for part in one.parts]) * cell + _TOY_GLOBAL * int(offset) + sizes["one"]

    return run


_TOY_READS = [
    *("_Toy.offset", "_Toy.parts", "_Toy.scale", "_Toy.sizes", "builtins.getattr", "builtins.int", "builtins.sum"),
    *("cell", "facts._TOY_GLOBAL", "one.parts[…]", "sizes['one']", "toy"),
]


@functools.cache
def records_reads() -> bool:
    """Whether the recorder finds all that a known function reads, and nothing else."""
    toy, functions = _toy_function(), Functions()
    functions.learn(toy)
    reads = Reads(functions, looks_into=lambda file: file == __file__)
    try:
        with reads.recording():
            toy()
    except TracingUnavailableError:
        return True  # nobody can tell, and `watching` will say why
    except Exception:
        return False  # a Python whose bytecode or frames are unlike those that are known
    return sorted(fact.name for fact in reads.facts.values() if fact.value is not ABSENT) == _TOY_READS
