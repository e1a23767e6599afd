"""A program in a terminal of its own: what a person types and sees."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
_BEGUN = re.compile(r"\x1b(\[[0-9;?]*)?$")


class Terminal:
    """Both ends: keys go in, the screen comes out."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self.screen = ""
        """All that was written, without colours and movements."""
        self._seen = 0
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        """A character may come in two reads, and so may an escape."""
        self._begun = ""

    def type(self, keys: bytes | str) -> None:
        """As a person would: not in the moment in which a prompt appears, when Python's readline may miss a signal."""
        time.sleep(0.3)
        os.write(self._end, keys.encode() if isinstance(keys, str) else keys)

    def until(self, text: str, seconds: float = 90) -> str:
        """Wait until this is on the screen, after what was waited for before; what came up to there."""
        end = time.monotonic() + seconds
        while (place := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"no {text!r} on the screen:\n{self.screen}"
            assert self._read(0.1) or self.process.poll() is None, f"it ended without {text!r}:\n{self.screen}"
        new, self._seen = self.screen[self._seen : place + len(text)], place + len(text)
        return new

    def interrupt(self, text: str) -> None:
        """Ctrl-C at a prompt until this is on the screen: readline misses a signal that comes just before it waits."""
        for _ in range(4):
            self.type(CTRL_C)
            try:
                self.until(text, seconds=10)
            except AssertionError:
                if self.process.poll() is not None:
                    raise
            else:
                return
        raise AssertionError(f"no {text!r} after four interrupts:\n{self.screen}")

    def status(self, seconds: float = 90, again: bytes = b"") -> int:
        """Wait for its end; what is given as `again` is typed every ten seconds."""
        begun, typed = time.monotonic(), 1
        while self.process.poll() is None:
            passed = time.monotonic() - begun
            assert passed < seconds, f"it does not end:\n{self.screen}"
            if again and passed > 10 * typed:
                typed += 1
                self.type(again)
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, wait: float) -> bool:
        if not select.select([self._end], [], [], wait)[0]:
            return False
        try:
            data = os.read(self._end, 65536)
        except OSError:  # the other side is closed
            return False
        text = self._begun + self._decode(data)
        begun = _BEGUN.search(text)
        self._begun = begun.group() if begun else ""
        self.screen += _ESCAPES.sub("", text.removesuffix(self._begun))
        return bool(data)


@contextmanager
def terminal(*command: str, home: Path) -> Iterator[Terminal]:
    """Run `phonograph` with these arguments in a new terminal; it is its own session, as a shell would make it."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "XDG_STATE_HOME": str(home)}
    with subprocess.Popen(
        [sys.executable, "-m", "phonograph", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: _own(theirs),  # noqa: PLW1509
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(ours)


def _own(descriptor: int) -> None:
    """Make it the terminal that sends signals to this session."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
