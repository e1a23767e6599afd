"""JSON fields: a foreign file's dict, read field by field; an error names the value, and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from phonograph.errors import CheckpointError
from phonograph.numbers import is_finite, is_whole

_MAX_FILE_BYTES = 100 * 2**20
"""Longer than any description of a model; a file is read whole."""


@dataclass(frozen=True)
class Fields:
    """The fields of a foreign dict; a field that is null counts as absent."""

    source: str
    """The file, and the section in it, that errors name."""
    values: Mapping[str, object]

    @classmethod
    def from_json(cls, path: Path) -> Fields:
        """The object in a JSON file."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise CheckpointError(f"reading {path}: {error.strerror}. Get the file again.") from None
        if len(text) > _MAX_FILE_BYTES:
            raise CheckpointError(
                f"reading {path}: it is longer than {_MAX_FILE_BYTES:,} bytes, which no such file is. Get it again."
            )
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str | bytes, source: str, *, unique: bool = False) -> Fields:
        """The object in a JSON text; of equal keys the last counts, unless they must be `unique`."""
        try:
            values = json.loads(text, object_pairs_hook=_without_duplicates if unique else None)
        except RecursionError:
            raise CheckpointError(f"reading {source}: the JSON is nested too deeply. Get the file again.") from None
        except ValueError as error:
            raise CheckpointError(f"reading {source}: not valid JSON ({error}). Get the file again.") from None
        if not isinstance(values, dict):
            raise CheckpointError(
                f"reading {source}: found a JSON {type(values).__name__}; expected an object. Get the file again."
            )
        return cls(source, values)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not is_whole(value):
            self._refuse(name, "an integer of 64 bits")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not is_finite(value):
            self._refuse(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self._refuse(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(name, "a list of strings")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """An integer or a list of them; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        given = value if isinstance(value, list) else [value]
        if not all(map(is_whole, given)):
            self._refuse(name, "an integer of 64 bits or a list of them")
        return tuple(given)

    def section(self, name: str) -> Fields:
        """The object under a name; absent is empty."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self._refuse(name, "an object")
        return Fields(f"{self.source}, {name}", value)

    def below(self, prefix: str) -> Fields:
        """The fields whose dotted names start with a prefix, without it."""
        values = {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}
        return Fields(f"{self.source}, {prefix}*", values)

    def _refuse(self, name: str, expected: str) -> NoReturn:
        value = self.values.get(name)
        found = "is missing" if value is None else f"is {_short(value)}"
        raise CheckpointError(
            f"reading {self.source}: {name} {found}; expected {expected}. Correct it, or get the file again."
        )


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the key {_short(twice)} is there twice")
    return found


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists within lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
