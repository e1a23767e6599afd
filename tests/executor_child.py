"""An executor in a process of its own, for tests: what it knows of requests is what steps say.

Run as a program it reads (verb, value) from standard input and answers each; `RemoteExecutor` is the other end.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from phonograph import LLM, EngineOptions
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.step_builder import StepTables
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.step import Step, Undone
from phonograph.engine.requests.step import Sampled


def tiny(device: str) -> LLM:
    """The same engine wherever it is made."""
    options = EngineOptions(
        max_seqs=4, max_tokens=16, max_len=64, page_size=4, cache_tokens=64, dtype=torch.float32, max_ahead=2
    )
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=options)


class RemoteExecutor:
    """Sends steps to an executor in a child process, and nothing else."""

    def __init__(self, device: str, vocab: int, step_tables: StepTables) -> None:
        self.vocab = vocab
        self.step_tables = step_tables
        self.sent: list[bytes] = []
        """Every step, as it went over."""
        self.fails_at = 0
        """The launch that raises after all of its work is done; counted from 1."""
        command = [sys.executable, str(Path(__file__)), device]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def launch(self, step: Step) -> int:
        self.sent.append(pickle.dumps(step))
        verb = "launch and fail" if len(self.sent) == self.fails_at else "launch"
        found = self._ask(verb, step)
        assert isinstance(found, int)
        return found

    def collect(self, launched: Any) -> Sampled:
        sampled = self._ask("collect", launched)
        assert isinstance(sampled, Sampled)
        return sampled

    def put_back(self, undone: Undone) -> None:
        self._ask("put back", undone)

    def heartbeat(self) -> None:
        self._ask("heartbeat", None)

    def close(self) -> None:
        self._child.communicate(timeout=60)
        assert self._child.returncode == 0

    def _ask(self, verb: str, value: object) -> object:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump((verb, value), self._child.stdin)
        self._child.stdin.flush()
        answer: object = pickle.load(self._child.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Child:
    """What the child does with each verb."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launched: dict[int, Any] = {}

    def answer(self, verb: str, value: Any) -> object:
        match verb:
            case "launch":
                self._launched[len(self._launched)] = self._executor.launch(value)
                return len(self._launched) - 1
            case "launch and fail":
                self._executor.collect(self._executor.launch(value))
                raise RuntimeError("injected")
            case "collect":
                return self._executor.collect(self._launched[value])
            case "put back":
                return self._executor.put_back(value)
        return self._executor.heartbeat()


def main() -> None:
    child = Child(tiny(sys.argv[1]).executor)
    while True:
        try:
            verb, value = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = child.answer(verb, value)
        except RuntimeError as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
