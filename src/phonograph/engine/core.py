"""The engine core: schedule, execute, commit, report."""

from __future__ import annotations

import logging
from collections import deque

import torch

from phonograph.engine.admission import refuse_unknown_tokens
from phonograph.engine.executor import Executor, Launched
from phonograph.engine.request import FinishReason, Request
from phonograph.engine.scheduler import Scheduler
from phonograph.engine.sequence import Sequence
from phonograph.engine.step import Step, Update
from phonograph.errors import RequestError

log = logging.getLogger("phonograph")


class EngineCore:
    """Owns the scheduler and the executor; commit lags launch by up to `max_ahead` steps."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._in_flight: deque[Launched] = deque()
        self._news: list[Update] = []

    def add(self, request: Request) -> list[Sequence]:
        """Take a request in; refused with the reason if it can't be served."""
        if request.params.logprobs is not None:
            raise RequestError(f"request {request.id}: logprobs can't be served yet. Leave it out.")
        refuse_unknown_tokens(request, self.executor.vocab)
        return self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Give a request up; its pages are free once its last launched step is committed."""
        self._news += self.scheduler.cancel(request_id)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for a reason that the text layer found."""
        self.scheduler.finish(sequence, reason)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and not self._in_flight

    def step(self) -> list[Update]:
        """Schedule, execute, commit, report."""
        step = self.scheduler.schedule()
        if step is not None:
            self._in_flight.append(self._execute(step))
        if self._in_flight and (step is None or len(self._in_flight) > self.scheduler.limits.max_ahead):
            done = self._in_flight.popleft()
            self._news += self.scheduler.commit(done.step, done.result())
        news, self._news = self._news, []
        return news

    def _execute(self, step: Step) -> Launched:
        try:
            return self.executor.launch(step)
        except Exception as error:
            log.warning(
                "step %d failed (%s: %s); trying its sequences one by one", step.number, type(error).__name__, error
            )
            return self._execute_singly(step)

    def _execute_singly(self, step: Step) -> Launched:
        """One pass per sequence: whoever raises is failed, the others go on."""
        sampled: dict[Sequence, torch.Tensor] = {}
        for part in _parts(step):
            try:
                tokens = self.executor.launch(part).tokens
            except Exception as error:
                self._news += self.scheduler.fail(part.sequences[0], f"{type(error).__name__}: {error}")
                continue
            for sequence in part.sampling:
                sampled[sequence] = tokens
        # A failed sequence's token is dropped at commit.
        nothing = torch.zeros(1, dtype=torch.int64, device=self.executor.device.torch_device)
        found = [sampled.get(sequence, nothing) for sequence in step.sampling]
        return Launched(step, torch.cat(found) if found else nothing[:0])


def _parts(step: Step) -> list[Step]:
    """The step's sequences, each in a step of its own."""
    parts = [Step(step.number, (sequence,), (), ()) for sequence in step.decodes]
    return parts + [Step(step.number, (), (chunk,), step.page_updates) for chunk in step.prefills]
