"""Messages come out of a channel as they went in, however the bytes are cut."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.engine.process.channel import Channel, Frames, frame


@given(st.lists(st.binary(max_size=40)), st.integers(1, 64))
def test_frames_are_put_together_again(messages: list[bytes], size: int) -> None:
    wire = b"".join(frame(message) for message in messages)
    frames = Frames()
    found = [message for start in range(0, len(wire), size) for message in frames.add(wire[start : start + size])]
    assert found == messages


def test_a_channel_takes_all_that_is_there_and_waits_only_if_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        assert channel.receive(wait=0) == []
        ours.sendall(frame(b"one") + frame(b"two") + frame(b"three")[:3])
        assert channel.receive_one() == b"one"
        assert channel.receive(wait=None) == [b"two"]
        assert channel.receive(wait=0) == []
        ours.sendall(frame(b"three")[3:])
        assert channel.receive(wait=None) == [b"three"]
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(wait=None)
        with pytest.raises(EOFError):
            channel.send(b"anybody?")
