"""Library objects: where objects of the standard library keep what their methods tell."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

from phonograph.graphs.recording.contents import AllContents
from phonograph.graphs.recording.fact import AllItems, InDict, Source
from phonograph.graphs.recording.lookup import instance_dict

_OF_LEVELS = ("isEnabledFor", "getEffectiveLevel")
_OF_HANDLERS = ("handlers", "hasHandlers")
_OF_QUEUES = ("empty", "full", "qsize", "queue")


def library_reads(owner: Any, name: str) -> Iterator[tuple[str, Source]]:
    """What `owner.name` tells, or is asked for when it is called: its name, and where it lies."""
    if isinstance(owner, threading.Event) and name in ("is_set", "wait"):
        yield "is_set()", InDict(vars(owner), "_flag")
    elif isinstance(owner, queue.Queue) and name in _OF_QUEUES:
        yield "queue", AllContents.of(owner.queue)
    elif isinstance(owner, logging.Logger) and name in (*_OF_LEVELS, *_OF_HANDLERS):
        yield from _of_logger(owner, name)
    elif isinstance(owner, logging.LoggerAdapter):
        yield from library_reads(owner.logger, name)
    elif (held := instance_dict(owner)) is not None and name in held:
        yield name, InDict(held, name)


def _of_logger(logger: logging.Logger, name: str) -> Iterator[tuple[str, Source]]:
    """A level is that of the first logger upwards that has one; handlers are those of all."""
    yield "disabled", InDict(vars(logger), "disabled")
    yield "manager.disable", InDict(vars(logger.manager), "_disable")
    one: logging.Logger | None = logger
    while one is not None:
        if name in _OF_LEVELS:
            yield "level", InDict(vars(one), "level")
            one = one.parent if not one.level else None
        else:
            yield "handlers", AllItems(one.handlers)
            yield "propagate", InDict(vars(one), "propagate")
            one = one.parent if one.propagate else None
