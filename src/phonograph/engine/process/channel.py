"""Channel: frames over a pair of connected sockets: a length, then the bytes of one message."""

from __future__ import annotations

import select
import socket
import struct
import threading

_LENGTH = struct.Struct("<I")
_MANY = 1 << 18
"""Bytes to read at once."""


def frame(data: bytes) -> bytes:
    """One message as it goes over the wire."""
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages, however they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete."""
        buffer = self._buffer
        buffer += data
        found: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            found.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return found


class Channel:
    """The core's end: sends at once, and reads with or without blocking. A front that has exited raises EOFError."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._arrivals = select.poll()
        self._arrivals.register(sock, select.POLLIN)
        self._frames = Frames()
        self._kept: list[bytes] = []

    def send(self, data: bytes) -> None:
        """Blocks while the socket's buffer is full, so that a slow front exerts back pressure. Thread-safe."""
        try:
            with self._sending:
                self.sock.sendall(frame(data))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the front has closed the channel") from None

    def receive_one(self) -> bytes:
        """Wait for the next message; those after it are kept."""
        while not (found := self.receive(wait=None)):
            pass
        first, *self._kept = found
        return first

    def receive(self, *, wait: float | None) -> list[bytes]:
        """All messages that are there; if none is, those that come within the timeout, or whenever they come."""
        found, self._kept = self._kept, []
        if wait != 0 and not found:
            self._arrivals.poll(None if wait is None else wait * 1000)
        while True:
            try:
                data = self.sock.recv(_MANY, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError("the front has closed the channel")
            found += self._frames.add(data)
