"""NeutralField: a field of other servers, accepted at values that change nothing here, and refused at all others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from phonograph.server.http.failures import ApiError

_MOST_BYTES = 32
"""The largest neutral value in bytes: larger ones are not decoded."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class NeutralField:
    """Values that a field may have, and why no others. Null counts as absent."""

    because: str
    values: tuple[object, ...] = ()

    def takes(self, value: object) -> bool:
        return value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values
        )

    def refusal(self, name: str) -> ApiError:
        shown = " or ".join(f"`{_encode(value).decode()}`" for value in (*self.values[:1], None))
        message = f"`{name}` is not supported: {self.because}. Leave it out, or send {shown}."
        return ApiError(400, message, param=name, code="unsupported")


def without_neutral(data: bytes, table: Mapping[str, NeutralField], known: Collection[str]) -> bytes:
    """A body without the fields of `table` that it does not know itself; ApiError where one is not neutral."""
    fields = _decode_fields(data)
    for name in [name for name in fields if name in table and name not in known]:
        written = bytes(fields.pop(name))
        if len(written) > _MOST_BYTES or not table[name].takes(msgspec.json.decode(written)):
            raise table[name].refusal(name)
    return _encode(fields)
