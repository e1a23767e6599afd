"""The dict watcher: every store is told, reads are not, and nothing is left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from phonograph.graphs.recording.dict_watcher import DictWatcher, dict_watcher

STORES: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "set": lambda one: one.update(a=2),
    "equal": lambda one: one.__setitem__("a", 1.0),
    "new": lambda one: one.setdefault("c", 1),
    "delete": lambda one: one.__delitem__("a"),
    "pop": lambda one: one.pop("a"),
    "popitem": lambda one: one.popitem(),
    "clear": lambda one: one.clear(),
    "merge": lambda one: one.__ior__({"a": 3}),
}


@pytest.fixture
def watcher() -> DictWatcher:
    found = dict_watcher()
    if found is None:
        pytest.skip("this Python tells of no stores")
    return found


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_every_store_is_told(watcher: DictWatcher, store: Callable[[dict[Any, Any]], Any]) -> None:
    one, other = {"a": 1, "b": 2}, {"a": 1}
    both, alone = watcher.watch([one, other]), watcher.watch([other])
    before = watcher.num_stores(one)
    assert both()
    store(one)
    assert not both()
    assert alone()
    assert watcher.num_stores(one) > before
    assert watcher.watch([one, other])(), "a new flag begins now"


def test_reads_are_not(watcher: DictWatcher) -> None:
    one = {"a": 1}
    flag = watcher.watch([one])
    assert one.get("a") == one["a"] == next(iter(one.values()))
    assert one.copy() == one
    assert one.setdefault("a", 5) == 1
    assert flag()


def test_stores_of_attributes_are_told_however_often_they_are_made(watcher: DictWatcher) -> None:
    class Thing:
        number = 0

    thing = Thing()
    thing.number = 1
    for _ in range(100):
        flag = watcher.watch([thing.__dict__])
        thing.number += 1
        assert not flag()


def test_who_is_gone_is_told_no_more_and_others_are(watcher: DictWatcher) -> None:
    one = {"a": 1}
    first, second = watcher.watch([one]), watcher.watch([one])
    del first
    gc.collect()
    one["a"] = 2
    assert not second()
    del second
    gc.collect()
    assert id(one) not in watcher._flags
    count = watcher.num_stores(one)
    one["a"] = 3
    assert watcher.num_stores(one) == count, "nobody watches it"


def test_a_dict_lives_as_long_as_its_flag(watcher: DictWatcher) -> None:
    class Kept(dict[str, int]):
        pass

    one = Kept(a=1)
    flag, address = watcher.watch([one]), id(one)
    del one
    gc.collect()
    assert flag()
    assert address in watcher._flags
    del flag
    gc.collect()
    assert address not in watcher._flags
    assert address not in watcher._num_stores


def test_dicts_that_come_and_go_leave_nothing(watcher: DictWatcher) -> None:
    before = len(watcher._flags)
    for number in range(2000):
        one = {"n": number}
        flag = watcher.watch([one])
        one["n"] = -1
        assert not flag()
    del one, flag
    gc.collect()
    assert len(watcher._flags) == before


_LEFT_AT_EXIT = """
import sys
from phonograph.graphs.recording.dict_watcher import dict_watcher
kept = [vars(one) for one in list(sys.modules.values()) if type(vars(one)) is dict]
sys.flag_of_a_test = dict_watcher().watch(kept)
"""


def test_python_may_end_while_dicts_are_watched(watcher: DictWatcher) -> None:
    ended = subprocess.run([sys.executable, "-c", _LEFT_AT_EXIT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
