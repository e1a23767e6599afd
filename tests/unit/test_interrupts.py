"""Interrupts: one Ctrl-C ends a command, whatever Python is doing when it comes."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest


def run(program: str) -> tuple[int, str, str]:
    """Status, output and errors of a program of its own."""
    command = [sys.executable, "-c", "import signal, sys, time\n" + dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "module", ["phonograph.cli.main", "torch", "numpy", "numpy._core.multiarray", "phonograph.engine.llm"]
)
def test_during_imports_it_ends_the_command_at_once(module: str) -> None:
    program = f"""
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == {module!r}:
                sys.meta_path.remove(self)
                print("interrupted", flush=True)
                signal.raise_signal(signal.SIGINT)

    from phonograph.__main__ import run

    sys.meta_path.insert(0, Interrupting())
    sys.argv = ["phonograph", "generate", "--prompt", "x", "--shape", "tiny", "--device", "cpu"]
    sys.exit(run())
    """
    assert run(program) == (130, "interrupted\n", "")


@pytest.mark.parametrize("hit", ["finalizer", "weak reference"])
def test_in_what_can_not_raise_it_is_given_again(hit: str) -> None:
    program = f"""
    import weakref
    from phonograph import interrupts

    class Kept:
        def __del__(self):
            if {hit!r} == "finalizer":
                self.end()

        def end(self, dead=None):
            print("interrupted")
            signal.raise_signal(signal.SIGINT)

    interrupts.install()
    kept = Kept()
    watch = weakref.ref(kept, lambda dead: Kept.end(None)) if {hit!r} != "finalizer" else None
    try:
        del kept
        print("goes on")
        time.sleep(60)
    except KeyboardInterrupt:
        print("ended")
    """
    assert run(program) == (0, "interrupted\ngoes on\nended\n", "")


def test_other_errors_of_finalizers_are_told_as_ever() -> None:
    program = """
    from phonograph import interrupts

    class Wrong:
        def __del__(self):
            raise ValueError("a wrong finalizer")

    interrupts.install()
    Wrong()
    """
    status, output, errors = run(program)
    assert (status, output) == (0, "")
    assert "Exception ignored in" in errors
    assert "a wrong finalizer" in errors


def test_work_of_asyncio_is_cancelled_and_may_clean_up() -> None:
    program = """
    import asyncio
    from phonograph import interrupts

    async def work():
        asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            print("cleaned up")

    interrupts.install()
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts.left_to_asyncio():
            asyncio.run(work())
    except KeyboardInterrupt:
        print("ended", signal.getsignal(signal.SIGINT) is before)
    """
    assert run(program) == (0, "cleaned up\nended True\n", "")


def test_after_the_command_it_ends_the_process_and_no_output_is_lost() -> None:
    program = """
    import atexit
    from phonograph import interrupts

    atexit.register(signal.raise_signal, signal.SIGINT)
    interrupts.install()
    interrupts.end_at_once_from_now_on()
    print("the output")
    """
    assert run(program) == (130, "the output\n", "")


def test_a_signal_that_others_handle_or_ignore_stays_theirs() -> None:
    program = """
    from phonograph import interrupts

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.install()
    with interrupts.left_to_asyncio():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    interrupts.end_at_once_from_now_on()
    signal.raise_signal(signal.SIGINT)
    """
    assert run(program) == (0, "", "")
