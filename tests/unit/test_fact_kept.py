"""Facts that are read by methods and getters that were kept, in arrays, enums, deep containers and loggers."""

from __future__ import annotations

import array
import enum
import functools
import logging
import operator
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fact_bodies import SLOTS, Make, X, assert_seen_at_once, made, of
from phonograph import Replay, graphed
from phonograph.graphs.progress import silent
from phonograph.graphs.recording.contents import AllContents
from phonograph.graphs.recording.places import ABSENT


def kept(
    hold: Callable[[], Any],
    keep: Callable[[Any], Any],
    body: Callable[[Any, torch.Tensor], Any],
    change: Callable[[Any], object],
) -> Make:
    """A body over what was made of an object, and kept."""

    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        held = hold()
        mine = keep(held)
        return lambda x: body(mine, x), lambda: change(held)

    return make


def table() -> dict[str, Any]:
    return {"s": 2.0, "hits": 0}


def store(held: Any) -> None:
    held["s"] = 9.0


ITEM = operator.itemgetter("s")
PATH = operator.attrgetter("a.s")
KEPT: dict[str, Make] = {
    "get": kept(table, lambda d: d.get, lambda get, x: x * get("s"), store),
    "get of an attribute": kept(table, lambda d: SimpleNamespace(find=d.get), lambda o, x: x * o.find("s", 1.0), store),
    "__getitem__": kept(table, lambda d: d.__getitem__, lambda get, x: x * get("s"), store),
    "a list's __getitem__": kept(
        lambda: [2.0], lambda a: a.__getitem__, lambda get, x: x * get(0), lambda a: a.append(a.pop() + 1)
    ),
    "a partial of get": kept(table, lambda d: functools.partial(d.get, "s"), lambda get, x: x * get(), store),
    "get in map": kept(table, lambda d: d, lambda d, x: x * sum(map(d.get, ["s"])), store),
    "a kept get in map": kept(table, lambda d: d.get, lambda get, x: x * sum(map(get, ["s"])), store),
    "get as a key": kept(table, lambda d: d, lambda d, x: x * len(max(d, key=d.get)), lambda d: d.update(hits=7)),
    "an itemgetter": kept(table, lambda d: d, lambda d, x: x * ITEM(d), store),
    "what an itemgetter gets": kept(
        lambda: {"s": SimpleNamespace(t=2.0)},
        lambda d: d,
        lambda d, x: x * ITEM(d).t,
        lambda d: setattr(d["s"], "t", 9.0),
    ),
    "an attrgetter": kept(
        lambda: SimpleNamespace(a=SimpleNamespace(s=2.0)),
        lambda o: o,
        lambda o, x: x * PATH(o),
        lambda o: setattr(o.a, "s", 9.0),
    ),
    "a methodcaller": kept(
        table, lambda d: (d, operator.methodcaller("get", "s")), lambda two, x: x * two[1](two[0]), store
    ),
    "join": of(["a"], lambda names, x: x * len("".join(names)), lambda names: names.append("b")),
    "format": of([1], lambda a, x: x * len("{}".format(a)), lambda a: a.append(2)),  # noqa: UP032
}


class Layer:
    def __init__(self) -> None:
        self.scale = 2.0


def struct() -> Any:
    found = np.zeros(1, dtype=[("scale", "f4")])
    found["scale"] = 2
    return found


def objects() -> Any:
    found = np.empty(1, dtype=object)
    found[0] = Layer()
    return found


class Act(enum.Enum):
    SCALES = [2.0]  # noqa: RUF012


class Sized(enum.Enum):
    ONE = 1

    def __init__(self, number: int) -> None:
        self.config = SimpleNamespace(scale=2.0)


def nested(levels: int) -> Any:
    found: Any = {"v": 2}
    for _ in range(levels):
        found = [found]
    return found


def innermost(found: Any) -> Any:
    while isinstance(found, list):
        found = found[0]
    return found


HELD: dict[str, Make] = {
    "a structured array": of(
        struct(), lambda a, x: x * float(a["scale"][0]), lambda a: operator.setitem(a, "scale", 9)
    ),
    "an object in an array": of(objects(), lambda a, x: x * a[0].scale, lambda a: setattr(a[0], "scale", 9.0)),
    "a list in an array": of(
        np.array([[1.0], None], dtype=object), lambda a, x: x * a[0][0], lambda a: operator.setitem(a[0], 0, 9.0)
    ),
    "array.array": of(array.array("f", [2.0]), lambda a, x: x * a[0], lambda a: operator.setitem(a, 0, 9.0)),
    "array.array as a whole": of(array.array("f", [2.0]), lambda a, x: x * sum(a), lambda a: a.append(9.0)),
    "six levels": of(nested(6), lambda a, x: x * len(str(a)), lambda a: innermost(a).update(v=99999)),
    "twenty levels": of(nested(20), lambda a, x: x * len(str(a)), lambda a: innermost(a).update(v=99999)),
    "a queue": kept(queue.Queue, lambda q: q, lambda q, x: x * 3 if q.empty() else x, lambda q: q.put(1)),
    "an attribute of a library's object": kept(
        lambda: logging.Handler(level=10), lambda h: h, lambda h, x: x * h.level, lambda h: h.setLevel(20)
    ),
}


def enum_value() -> tuple[Callable[..., Any], Callable[[], object]]:
    Act.SCALES.value[0] = 2.0
    return lambda x: x * Act.SCALES.value[0], lambda: operator.setitem(Act.SCALES.value, 0, 9.0)


def enum_by_name() -> tuple[Callable[..., Any], Callable[[], object]]:
    Sized.ONE.config.scale = 2.0
    return lambda x: x * Sized["ONE"].config.scale * Sized(1).value, lambda: setattr(Sized.ONE.config, "scale", 9.0)


def logger_level(change: Callable[[logging.Logger], object]) -> Make:
    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        logger = logging.Logger("test_of_levels")
        logger.parent, logger.manager = logging.Logger("above", logging.INFO), logging.Manager(logging.getLogger())  # type: ignore[arg-type]

        def body(x: torch.Tensor) -> torch.Tensor:
            return x * 2 if logger.isEnabledFor(logging.INFO) else x

        return body, lambda: change(logger)

    return make


def above(logger: logging.Logger) -> logging.Logger:
    assert logger.parent is not None
    return logger.parent


def disable(logger: logging.Logger) -> None:
    logger.manager.disable = logging.CRITICAL


def then_forget(change: Callable[[logging.Logger], object]) -> Make:
    """Loggers that no manager knows keep what they have found."""

    def both(logger: logging.Logger) -> None:
        change(logger)
        logger._cache.clear()  # type: ignore[attr-defined]

    return logger_level(both)


def handlers() -> tuple[Callable[..., Any], Callable[[], object]]:
    logger = logging.Logger("test_of_handlers")
    return lambda x: x * 2 if logger.hasHandlers() else x, lambda: logger.addHandler(logging.NullHandler())


LIBRARY: dict[str, Make] = {
    "the value of an enum": enum_value,
    "an attribute of an enum's member": enum_by_name,
    "a logger's level": then_forget(lambda logger: logger.setLevel(logging.ERROR)),
    "the level of a logger above": then_forget(lambda logger: above(logger).setLevel(logging.ERROR)),
    "logging is disabled": then_forget(disable),
    "a logger's handlers": handlers,
}


class Quantized(nn.Module):
    """A layer whose weights are packed in C++, in a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        engines = [one for one in torch.backends.quantized.supported_engines if one != "none"]
        torch.backends.quantized.engine = engines[0]
        self.layers = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def quantized() -> tuple[Callable[..., Any], Callable[[], object]]:
    one, other = Quantized(), Quantized()
    return one, lambda: one.load_state_dict(other.state_dict())


SEEN = KEPT | HELD | LIBRARY | {"packed weights": quantized}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SEEN.items()])
@pytest.mark.filterwarnings("ignore")
def test_a_change_is_seen_at_once(make: Make) -> None:
    assert_seen_at_once(make)


UNSEEN: dict[str, Make] = {
    "another key of a kept get": kept(table, lambda d: d.get, lambda get, x: x * get("s"), lambda d: d.update(hits=1)),
    "another key of an itemgetter": kept(table, lambda d: d, lambda d, x: x * ITEM(d), lambda d: d.update(hits=1)),
    "another attribute of an attrgetter": kept(
        lambda: SimpleNamespace(a=SimpleNamespace(s=2.0)),
        lambda o: o,
        lambda o, x: x * PATH(o),
        lambda o: setattr(o, "hits", 1),
    ),
    "a level of logging that nobody asks for": kept(
        lambda: logging.Logger("test_of_logs", logging.ERROR),
        lambda log: log,
        lambda log, x: (log.debug("%s", 1), x * 2)[1],
        lambda log: log.setLevel(logging.INFO),
    ),
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in UNSEEN.items()])
def test_what_nobody_reads_is_no_alarm(make: Make) -> None:
    body, change = make()
    run = made(body)
    change()
    assert torch.equal(run(X), body(X))
    assert isinstance(run.runner.last, Replay)


def test_of_a_container_with_many_values_the_upper_levels_are_looked_at() -> None:
    held = [nested(4) for _ in range(150)]
    source = AllContents.of(held)
    before = source.get()
    assert before is not ABSENT
    held[7] = nested(3)
    assert source.get() != before


def test_a_count_in_an_array_is_refused() -> None:
    counts = array.array("i", [0])

    def body(x: torch.Tensor) -> Any:
        counts[0] += 1
        return x * counts[0]

    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=[4], device="emulated")
    assert run.capture(silent).failures
    assert counts[0] == 0


@pytest.mark.parametrize(
    ("num_entries", "other", "most_calls"), [(2, None, 1), (40, None, 1), (2, object(), 1), (40, object(), 64)]
)
def test_large_containers_of_containers_are_looked_at_once_in_a_window(
    num_entries: int, other: object, most_calls: int
) -> None:
    """Unless all that they hold is plain."""
    table: list[Any] = [[float(index), "a", other] for index in range(num_entries)]

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * len(str(list(map(str, table))))

    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=[4], device="cpu")
    assert not run.capture(silent).failures
    table[-1][1] = "longer"
    calls = 0
    while run(X) is not None and isinstance(run.runner.last, Replay):
        calls += 1
    assert calls < most_calls
