"""Batch files on disk: input lines one at a time, and the requests that an unfinished output already answers."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from phonograph.errors import PlanError
from phonograph.server.batch.lines import BadLineError, BatchResult

_MANY = 1 << 20

_decode = msgspec.json.Decoder(BatchResult).decode


def numbered_lines(stream: BinaryIO, most: int) -> Iterator[tuple[int, bytes | BadLineError]]:
    """Numbered from 1, without blank ones; one of more than `most` bytes becomes an error, and is never held whole."""
    number = 0
    while line := stream.readline(most + 1):
        number += 1
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if len(line) > most and not line.endswith(b"\n"):
            size = len(line)
            while (rest := stream.readline(_MANY)) and not rest.endswith(b"\n"):
                size += len(rest)
            problem = f"it has more than {size + len(rest) - 1:,} bytes; at most {most:,} are taken. Send less."
            yield number, BadLineError("line_too_long", problem)
        elif line.strip():
            yield number, line


def count_lines(path: Path) -> int:
    """The number of lines of a file, by its newlines."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while part := file.read(_MANY):
            count, last = count + part.count(b"\n"), part
    return count + (not last.endswith(b"\n"))


def digest(custom_id: str) -> bytes:
    """A digest of an id: those of all lines are held in memory."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass
class Done:
    """Requests that an output file answers: by id, and by line number where a line had no id."""

    ids: set[bytes] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.ids) + len(self.lines)


def resumed(path: Path) -> Done:
    """Read an output file; a partial last line is truncated."""
    done, end = Done(), 0
    if not path.exists():
        return done
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                found = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"line {number} was not written by run-batch ({error})"
                raise PlanError(f"resuming {path}: {problem}. Give another --output.") from None
            if found.custom_id is not None:
                done.ids.add(digest(found.custom_id))
            elif found.error is not None:
                done.lines.add(found.error.line)
        file.truncate(end)
    return done
