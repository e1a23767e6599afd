"""Progress: drawn over itself on a terminal; elsewhere a line at the end, and one now and then while it takes long."""

from __future__ import annotations

import io

import pytest

from phonograph.graphs.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_every_step_in_one_line() -> None:
    out = Terminal()
    show = bar(out)
    for done in range(3):
        show("verifying decode", done, 2)
    assert out.getvalue().count("\r") == 3
    assert out.getvalue().splitlines()[-1].endswith("[########################] 2/2")
    assert out.getvalue().endswith("\n")


def test_a_file_gets_one_line_at_the_end() -> None:
    out = io.StringIO()
    show = bar(out)
    for done in range(3):
        show("verifying decode", done, 2)
    assert out.getvalue() == "verifying decode             [########################] 2/2\n"


def test_a_file_hears_of_what_takes_long_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("phonograph.graphs.progress.time.monotonic", lambda: now)
    out = io.StringIO()
    show = bar(out)
    for second in range(35):
        now = 100.0 + second
        show("verifying decode, 3 failed", second, 100)
    lines = out.getvalue().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["11/100", "22/100", "33/100"]
    assert all(line.startswith("verifying decode, 3 failed") for line in lines)
