"""FactCheck: whether all facts still hold, in microseconds; and where one does not, which.

Modes, values in dicts (by the dicts' versions), cells, slots and lists are looked at in every check. The addresses of
tensors, classes of modules, and functions' code and defaults take turns: a change is seen within `WINDOW` checks, and
at once where there are few, or where all parameters of a module move.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

from phonograph.graphs.recording import dict_versions, modes
from phonograph.graphs.recording.contents import AllContents, HasKey, InContext, IsTrue, KeptEntries, LengthOf
from phonograph.graphs.recording.dict_watcher import Unchanged
from phonograph.graphs.recording.fact import (
    AddressOf,
    AllItems,
    ClassOf,
    Computed,
    Fact,
    HooksOf,
    InCell,
    InDict,
    InList,
    InSlot,
    OfFunction,
    OfTensor,
    unchanged,
)
from phonograph.graphs.recording.function_memory import pointers_of
from phonograph.graphs.recording.places import ABSENT, PLAIN
from phonograph.graphs.recording.rebinding import rebound

log = logging.getLogger("phonograph")

WINDOW = 64
"""Every fact is checked at least once in this many checks."""
LAYOUT_WINDOW = 4 * WINDOW
"""The same for layouts of tensors; up to `WINDOW` tensors are looked at within that."""
_ALWAYS = 16
"""How many of those that take turns are checked each time: of a small model, all."""
_MAX_SLOW = 2
"""Nested containers that are checked every time; further ones take turns."""
_MAX_NESTED = 24
"""Values of a nested container that is checked every time, at 0.3 µs each; larger ones have a turn of their own."""
_OF_DICTS = (InDict, AllItems, HasKey, KeptEntries)
_FEW = 80
"""So many values in dicts are looked at one by one faster than by torch's guards."""
_MAX_STRIKES = 2
"""After this many stores that changed no fact, a dict's facts are checked one by one."""


class FactCheck:
    """Checks facts. A fact that differs is remembered, and checked first from then on."""

    def __init__(self, facts: Sequence[Fact], by_value: Iterable[int] = ()) -> None:
        self.facts = tuple(facts)
        in_dicts = sum(isinstance(fact.source, _OF_DICTS) for fact in self.facts)
        are_many = in_dicts > (0 if dict_versions.are_cheap() else _FEW)
        self.uses_versions = are_many and dict_versions.are_reliable()
        self._has_turns = in_dicts > _FEW and not self.uses_versions
        """Whether objects in dicts take turns too, so that a check stays cheap."""
        self.stale: Fact | None = None
        """The fact that differed in the last check."""
        self.others: tuple[str, ...] = ()
        """What else differed when it was found, by name."""
        self._by_value = set(by_value)
        """Dicts that are stored into all the time, whatever a body reads: by identity."""
        self._strikes: Counter[int] = Counter()
        self._modes = [fact for fact in self.facts if isinstance(fact.source, Computed)]
        self._hooks = [fact for fact in self.facts if isinstance(fact.source, HooksOf)]
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._num_handles = [RemovableHandle.next_id]
        self._holds: Callable[[], bool] = lambda: False
        self._is_armed = False

    @property
    def method(self) -> str:
        """How it checks, in words."""
        if not self._has_turns:
            how = "dict versions and generated code" if self.uses_versions else "generated code"
            return f"{how} at every call; addresses, defaults and large containers within {WINDOW} calls"
        return (
            f"generated code alone, since this Python or torch tells no dict versions: plain values at every call, "
            f"objects, addresses and defaults within {WINDOW} calls"
        )

    def check(self) -> Fact | None:
        """A fact that does not hold, or None."""
        if self.stale is None:
            if self._holds():
                return None
        elif self.stale.differs:
            return self.stale
        return self.look()

    def look(self) -> Fact | None:
        """The same, by a look at every fact."""
        if self.find() is None:
            self._arm()
        return self.stale

    def find(self) -> Fact | None:
        """The same, and the next check is not made ready."""
        differing = [fact for fact in self.facts if fact.differs]
        if differing and (equal := rebound(self.facts)) is not None:
            self.facts, differing = tuple(equal), []
        self.stale = differing[0] if differing else None
        self.others = tuple(dict.fromkeys(one.name for one in differing if one.name != differing[0].name))
        return self.stale

    # -- what is looked at in every check -----------------------------------------------------------------

    def _arm(self) -> None:
        """Make the check of now: nothing differs, so whatever failed it was about no fact."""
        self._strike()
        versioned: dict[int, dict[Any, Any]] = {}
        looked_at: list[Fact] = []
        rotating: list[Fact] = []
        large: list[Fact] = []
        num_slow = 0
        for fact in self.facts:
            source = fact.source
            if isinstance(source, AddressOf | OfFunction | ClassOf | OfTensor):
                rotating.append(fact)
            elif isinstance(source, HooksOf):
                if self.uses_versions:
                    versioned.update((id(one), one) for one in _hook_dicts(source) if one)
                elif any(fact.value):
                    looked_at.append(fact)
            elif not isinstance(source, Computed):
                holder: Any = source.holder if isinstance(source, _OF_DICTS) else None
                has_order = isinstance(holder, OrderedDict) and isinstance(source, AllItems)  # which no version tells
                if not isinstance(holder, dict) or has_order:
                    is_slow = isinstance(source, AllContents) and not source.is_flat
                    is_large = isinstance(source, AllContents) and is_slow and source.num_values > _MAX_NESTED
                    num_slow += is_slow and not is_large
                    (large if is_large else rotating if is_slow and num_slow > _MAX_SLOW else looked_at).append(fact)
                elif self.uses_versions and id(holder) not in self._by_value:
                    versioned[id(holder)] = holder
                elif not self._has_turns or isinstance(fact.value, PLAIN):
                    looked_at.append(fact)
                else:
                    rotating.append(fact)
        self._dicts = list(versioned.values())
        self._versions = dict_versions.versions_of(self._dicts) if self._dicts else []
        self._num_handles[0] = RemovableHandle.next_id
        self._holds = self._generated(looked_at, rotating, large)
        self._is_armed = True

    def _strike(self) -> None:
        """Count stores that changed no fact, and equal values that are others."""
        if not self._is_armed:
            return
        for one, then, now in zip(self._dicts, self._versions, dict_versions.versions_of(self._dicts), strict=True):
            if then != now:
                self._strikes[id(one)] += 1
                if self._strikes[id(one)] >= _MAX_STRIKES:
                    self._by_value.add(id(one))

    def _generated(
        self, looked_at: Sequence[Fact], rotating: Sequence[Fact], large: Sequence[Fact]
    ) -> Callable[[], bool]:
        code = _Generated()
        guard = _state_guard()
        if guard is not None:
            code.call(guard)
        for ask, answer in modes.fast_questions(self._modes, guarded=guard is not None):
            code.terms.append(f"{code.name(ask)}() == {code.name(answer)}")
        if self._hooks:
            same = functools.partial(_are_hooks_same, self._hooks, self._num_handles)
            handles, given = code.name(RemovableHandle), code.name(self._num_handles)
            code.terms.append(f"({handles}.next_id == {given}[0] or {code.name(same)}())")
        if self._dicts:
            check = dict_versions.unchanged_check(self._dicts)
            code.terms.append(f"{code.name(check)}.holds" if isinstance(check, Unchanged) else f"{code.name(check)}()")
        for fact in looked_at:
            code.add(fact)
        for source in (fact.source for fact in large if isinstance(fact.source, AllContents)):
            copied = source.plain_copy()
            if copied is not None:
                code.terms.append(f"{code.name(source.holder)} == {code.name(copied)}")
        for turns in (list(_turns(rotating)), list(_layouts(rotating)), list(_spread(large))):
            if turns:
                code.terms.append(f"{code.name(itertools.cycle(turns).__next__)}()()")
        return code.compiled()


def _are_hooks_same(hooks: Sequence[Fact], num_handles: list[int]) -> bool:
    """Whether handles were given out for other hooks than those of facts."""
    if any(fact.differs for fact in hooks):
        return False
    num_handles[0] = RemovableHandle.next_id
    return True


def _hook_dicts(source: HooksOf) -> Iterable[dict[Any, Any]]:
    if source.holder is None:
        return every_module._global_forward_hooks, every_module._global_forward_pre_hooks
    return source.holder._forward_hooks, source.holder._forward_pre_hooks


def _turns(facts: Sequence[Fact]) -> Iterator[Callable[[], bool]]:
    """Checks of some facts each, so few that all have their turn within the window.

    Each has the address of a parameter, so that a module whose parameters all move (`half()`) is seen at once.
    """
    parameters = [fact for fact in facts if isinstance(_moving(fact), torch.nn.Parameter)]
    others = [fact for fact in facts if not isinstance(_moving(fact), torch.nn.Parameter)]
    num_turns = min(WINDOW, -(-len(facts) // _ALWAYS))
    for turn in range(num_turns):
        code = _Generated()
        for fact in parameters[turn::num_turns] or parameters[turn % (len(parameters) or 1) :][:1]:
            code.add(fact)
        for fact in others[turn::num_turns]:
            code.add(fact)
        yield code.compiled()


def _layouts(facts: Sequence[Fact]) -> Iterator[Callable[[], bool]]:
    """Checks of how tensors lie in the memory that begins where it did. Each takes several times as long as an address:
    so where there are few, at most one in every fourth call, and where there are many, all within four windows."""
    tensors = [fact for fact in facts if isinstance(fact.source, AddressOf)]
    num_turns = min(LAYOUT_WINDOW, len(tensors))
    for turn in range(num_turns):
        code = _Generated()
        for fact in tensors[turn::num_turns]:
            code.add_layout(fact)
        yield code.compiled()
        yield from (_holds,) * max(0, min(3, WINDOW // num_turns - 1))


def _spread(facts: Sequence[Fact]) -> Iterator[Callable[[], bool]]:
    """Checks of one fact each, evenly over the window; the calls between have none."""
    if not facts:
        return
    for turn in range(WINDOW):
        first, last = (place * len(facts) // WINDOW for place in (turn, turn + 1))
        code = _Generated()
        for fact in facts[first:last]:
            code.add(fact)
        yield code.compiled() if first < last else _holds


def _holds() -> bool:
    return True


def _moving(fact: Fact) -> torch.Tensor | None:
    """The tensor whose address a fact is about."""
    return fact.source.holder if isinstance(fact.source, AddressOf) else None


def _state_guard() -> Callable[[], bool] | None:
    """torch's own guard of autocast, default dtype, deterministic algorithms and precision, if it has one."""
    try:
        from torch._C._dynamo.guards import GlobalStateGuard

        guard: Any = GlobalStateGuard()
        check: Callable[[], bool] = guard.check
        return check if check() else None
    except (ImportError, AttributeError, TypeError):
        return None


class _Generated:
    """A function that is written term by term: all must be true."""

    def __init__(self) -> None:
        self.terms: list[str] = []
        self._names: dict[str, Any] = {"unchanged": unchanged, "ABSENT": ABSENT}
        self._known: dict[int, str] = {}
        self._functions: dict[int, int] = {}
        """By identity of a function, the term that is about it."""

    def name(self, value: Any) -> str:
        """A name for a value in the code."""
        found = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = f"v{len(self._known)}"
            self._names[found] = value
        return found

    def call(self, check: Callable[[], bool]) -> None:
        self.terms.append(f"{self.name(check)}()")

    def add(self, fact: Fact) -> None:
        source, value = fact.source, fact.value
        if isinstance(source, AddressOf):
            self.terms.append(f"{self.name(source.holder)}.data_ptr() == {value[0]}")
            return
        if isinstance(source, AllItems) and not isinstance(source.holder, set):
            self._add_items(fact, source)
            return
        if isinstance(source, AllContents) and source.is_flat:
            self.terms.append(f"{self.name(source.holder)} == {self.name(source.holder.copy())}")
            return
        place, then = _place(source, self), self.name(value)
        if isinstance(source, OfFunction) and place is not None and (held := pointers_of(source.holder)) is not None:
            self._add_function(source.holder, held, f"({place} is {then} or unchanged({then}, {place}))")
        elif place is None:
            self.terms.append(f"not {self.name(fact)}.differs")
        elif value is not ABSENT:
            self.terms.append(f"({place} is {then} or unchanged({then}, {place}))")
        elif isinstance(source, InDict):
            self.terms.append(f"{self.name(source.key)} not in {self.name(source.holder)}")
        else:
            self.terms.append(f"not {self.name(fact)}.differs")

    def add_layout(self, fact: Fact) -> None:
        """A tensor's shape, dtype and strides."""
        (_, shape, dtype, (strides, is_conj, _)), tensor = fact.value, self.name(_moving(fact))
        self.terms.append(f"{tensor}.stride() == {strides} and {tensor}.shape == {shape}")
        self.terms.append(f"{tensor}.dtype is {self.name(dtype)}")
        if dtype.is_complex:
            self.terms.append(f"{tensor}.is_conj() is {is_conj}")

    def _add_function(self, function: Any, held: Any, same: str) -> None:
        """The same pointers to code and defaults, or else what Python's own way shows; once for both."""
        known = self._functions.get(id(function))
        if known is None:
            self.name(function)  # kept alive
            self._functions[id(function)] = len(self.terms)
            self.terms.append(f"({self.name(held)}.raw == {self.name(held.raw)} or {same})")
        else:
            self.terms[known] = f"{self.terms[known][:-1]} and {same})"

    def _add_items(self, fact: Fact, source: AllItems) -> None:
        """The same objects in the same order, told without comparing them by their own code."""
        holder, is_same, then = self.name(source.holder), self.name(operator.is_), fact.value
        if isinstance(source.holder, dict):
            keys, then = tuple(key for key, _ in fact.value), tuple(value for _, value in fact.value)
            are_names = all(type(key) is str for key in keys)
            same = (
                f"(*{holder},) == {self.name(keys)}"
                if are_names
                else f"all(map({is_same}, {holder}, {self.name(keys)}))"
            )
            same += f" and all(map({is_same}, {holder}.values(), {self.name(then)}))"
        else:
            same = f"all(map({is_same}, {holder}, {self.name(then)}))"
        same = f"len({holder}) == {len(then)} and {same}"
        self.terms.append(f"({same} or not {self.name(fact)}.differs)")

    def compiled(self) -> Callable[[], bool]:
        terms = " and ".join(self.terms) or "True"
        lines = ["def holds():", "    try:", f"        return {terms}", "    except Exception:", "        return False"]
        exec(compile("\n".join(lines), "<facts>", "exec"), self._names)
        # Not left among its own names: such a circle would keep tensors alive until a garbage collection.
        found: Callable[[], bool] = self._names.pop("holds")
        return found


def _place(source: Any, code: _Generated) -> str | None:
    """An expression that reads a source; None where it takes more than one."""
    text = _PLACES.get(type(source))
    is_plain = not isinstance(source, InDict | InList) or type(source.holder) in (dict, list)
    if text is None or not is_plain or getattr(source, "part", "") == "__kwdefaults__":
        return None
    names = {name: code.name(getattr(source, name)) for name in ("holder", "key", "slot") if hasattr(source, name)}
    return text.format(**names, index=getattr(source, "index", ""), part=getattr(source, "part", ""))


_PLACES = {
    InDict: "{holder}[{key}]",
    InCell: "{holder}.cell_contents",
    InSlot: "{slot}.__get__({holder})",
    InList: "{holder}[{index}]",
    InContext: "{holder}.get()",
    IsTrue: "(len({holder}) > 0)",
    LengthOf: "len({holder})",
    HasKey: "({key} in {holder})",
    ClassOf: "type({holder})",
    OfFunction: "{holder}.{part}",
    OfTensor: "{holder}.{part}",
}
"""By type of a source, the code that reads it."""
