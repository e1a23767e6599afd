"""Dict memory: tags are found where they are, every store is seen, reads are not, and dicts are kept alive."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from phonograph.graphs.recording import dict_versions
from phonograph.graphs.recording.dict_memory import unchanged_tags
from unit.test_dict_watcher import STORES

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="dicts of this Python have no tags")


def unchanged(*dicts: dict[Any, Any]) -> Callable[[], bool]:
    found = unchanged_tags(dicts, dict_versions._version())
    assert found is not None
    return found


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("at", [0, 1, 2, 499])
def test_every_store_is_seen_in_whichever_dict(at: int, store: Callable[[dict[Any, Any]], Any]) -> None:
    dicts: list[dict[Any, Any]] = [{"a": 1, "b": 2} for _ in range(500)]
    check, others = unchanged(*dicts), unchanged(*dicts[:at], *dicts[at + 1 :])
    assert check()
    store(dicts[at])
    assert not check()
    assert others()
    assert unchanged(*dicts)(), "a new check begins now"


def test_reads_are_not() -> None:
    one = {"a": 1}
    check = unchanged(one)
    assert one.get("a") == one["a"] == next(iter(one.values()))
    assert one.copy() == one
    assert one.setdefault("a", 5) == 1
    assert check()


def test_stores_of_attributes_are_seen_however_often_they_are_made() -> None:
    class Thing:
        number = 0

    thing = Thing()
    thing.number = 1
    for _ in range(100):
        check = unchanged(thing.__dict__, {})
        thing.number += 1
        assert not check()


def test_what_is_put_back_was_stored_all_the_same() -> None:
    one = {"a": 1}
    check = unchanged(one)
    one["a"] = 2
    one["a"] = 1
    assert not check()


def test_a_dict_lives_as_long_as_its_check() -> None:
    class Kept(dict[str, int]):
        pass

    one = Kept(a=1)
    check, gone = unchanged(one), weakref.ref(one)
    del one
    gc.collect()
    assert gone() is not None
    assert check()
    del check
    gc.collect()
    assert gone() is None


def test_tags_that_memory_does_not_have_are_not_read() -> None:
    assert unchanged_tags([{}], len) is None
    assert unchanged_tags([{}], lambda one: -1) is None
    assert unchanged_tags([{}], None) is None


def test_the_compiler_of_torch_is_not_needed() -> None:
    dicts: list[dict[Any, Any]] = [{} for _ in range(1000)]
    check = dict_versions.unchanged_check(dicts)
    assert check()
    assert check.__module__ == unchanged_tags.__module__
    dicts[700]["a"] = 1
    assert not check()
