"""Core loop: the process of the engine core: read messages, step, send outputs; sleep when there is nothing to do."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.llm import LLM
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.channel import Channel
from phonograph.engine.process.messages import (
    Add,
    Cancel,
    CheckIntegrity,
    Failed,
    Finish,
    FromCore,
    IntegrityReport,
    LoadProgress,
    Logged,
    Output,
    Ready,
    Shutdown,
    SpeculationInfo,
    StepOutput,
    ToCore,
)
from phonograph.engine.process.statistics import engine_stats
from phonograph.engine.process.traces import SequenceTrace, Traces
from phonograph.engine.requests.constraints import Constraint
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import PromptLogprob, Sequence
from phonograph.engine.requests.step import Update
from phonograph.errors import PhonographError, RequestError

log = logging.getLogger("phonograph")

STATS_SECONDS = 0.25
"""Seconds between stats while the core is busy."""
HEARTBEAT_SECONDS = 10.0
"""Idle seconds before a heartbeat pass checks the device, and stats are sent to the front."""
_COMPILING_SECONDS = 0.002
"""Poll interval for grammars being compiled while the core is otherwise idle."""
_COMPILERS = 2


class CoreLoop:
    """Runs an engine core for a front at the other end of a channel."""

    def __init__(self, core: EngineCore[Executor], channel: Channel) -> None:
        self._core = core
        self._channel = channel
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[ToCore]).decode
        self._live: dict[str, dict[int, Sequence]] = {}
        """The sequences of every request whose end was not sent to the front yet."""
        self._compiling: dict[str, tuple[Request, Future[Many[Constraint]]]] = {}
        """Requests whose grammars are being compiled, while the others go on."""
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._num_scored: dict[Sequence, int] = {}
        """Tokens of prompts whose scores the front has, by sequence."""
        self._outputs: list[Output] = []
        serving = {name for name, one in core.executor.passes.items() if one.declared.serves}
        self._traces = Traces({name: runner for name, runner in core.executor.runners.items() if name in serving})
        core.on_prompts = self._traces.launched
        self._ended: list[SequenceTrace] = []
        self._stats_due = 0.0
        self._is_over = False

    def run(self) -> None:
        """Serve until the front sends a stop; EOFError if the front exits without one."""
        try:
            while not self._is_over:
                self._turn()
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _turn(self) -> None:
        self._report()
        was_idle = self._core.is_idle
        resting = _COMPILING_SECONDS if self._compiling else HEARTBEAT_SECONDS
        found = self._channel.receive(wait=resting if was_idle else 0)
        for data in found:
            for message in self._decode(data):
                self._handle(message)
        self._add_compiled()
        if self._is_over:
            return
        if was_idle and not found and not self._compiling and self._core.is_idle:
            self._core.heartbeat()
        for update in self._core.step():
            self._note(update)

    def _report(self) -> None:
        """One message for the step; stats now and then, and before going idle."""
        now = time.monotonic()
        outputs, self._outputs = self._outputs, []
        rests = self._core.is_idle and not self._compiling
        stats = engine_stats(self._core) if now >= self._stats_due or rests else None
        if stats is not None:
            self._stats_due = now + STATS_SECONDS
        if outputs or stats is not None or self._ended:
            self.send(StepOutput(tuple(outputs), stats, tuple(self._ended)))
            self._ended.clear()

    def send(self, message: FromCore) -> None:
        self._channel.send(self._encode(message))

    def _handle(self, message: ToCore) -> None:
        match message:
            case Add(request) if request.params.grammar is not None:
                self._compiling[request.id] = request, self._compilers.submit(self._core.constraints, request)
            case Add(request):
                self._add(request, list)
            case Cancel(request_id):
                if (compiling := self._compiling.pop(request_id, None)) is not None:
                    compiling[1].cancel()
                for left in list(self._live.get(request_id, {}).values()):
                    self._forget(left, FinishReason.CANCELLED)
                self._core.cancel(request_id)
            case Finish(request_id, index):
                sequence = self._live.get(request_id, {}).get(index)
                if sequence is not None:
                    self._core.finish(sequence, FinishReason.STOP)
                    self._forget(sequence, FinishReason.STOP)
            case CheckIntegrity():
                self.send(self._checked())
            case Shutdown():
                self._is_over = True

    def _add_compiled(self) -> None:
        now = time.monotonic()
        for request, compiled in list(self._compiling.values()):
            late = request.deadline is not None and now >= request.deadline
            if late or compiled.done():
                del self._compiling[request.id]
            if late:
                compiled.cancel()
                ends = (Output(request.id, index, (), FinishReason.DEADLINE) for index in range(request.params.n))
                self._outputs += ends
            elif compiled.done():
                self._add(request, compiled.result)

    def _add(self, request: Request, constraints: Callable[[], Many[Constraint]]) -> None:
        try:
            self._live[request.id] = dict(enumerate(self._core.add(request, constraints())))
        except RequestError as error:
            field = error.field or ""
            self._outputs.append(Output(request.id, 0, (), FinishReason.ERROR, str(error), refused=True, field=field))

    def _note(self, update: Update) -> None:
        """Collect outputs for the front, except of requests that it cancelled or finished itself."""
        sequence, tokens, finish = update
        request_id, index = sequence.request.id, sequence.index
        if index not in self._live.get(request_id, {}):
            return
        if len(sequence.outputs) == len(tokens) > 0:
            self._traces.first_token(sequence)
        logprobs = tuple(sequence.logprobs[-len(tokens) :]) if tokens else ()
        scores = self._new_scores(sequence) if sequence.prompt_logprobs else ()
        vector = b"" if sequence.embedding is None else sequence.embedding.tobytes()
        told = (sequence.error, sequence.num_cached, logprobs, False, sequence.error_field, scores, vector)
        drafts = (sequence.num_drafted, sequence.num_accepted)
        states = sequence.states[-1].tobytes() if tokens and sequence.states else b""
        self._outputs.append(Output(request_id, index, tokens, finish, *told, drafts, states))
        if finish is not None:
            self._forget(sequence, finish)

    def _new_scores(self, sequence: Sequence) -> tuple[PromptLogprob, ...]:
        """Prompt logprobs not sent yet: sent step by step, since all of them would be a long message."""
        first = self._num_scored.get(sequence, 0)
        self._num_scored[sequence] = len(sequence.prompt_logprobs)
        return tuple(sequence.prompt_logprobs[first:])

    def _forget(self, sequence: Sequence, finish: FinishReason) -> None:
        """The front knows its end."""
        self._num_scored.pop(sequence, None)
        self._ended.append(self._traces.ended(sequence, finish))
        siblings = self._live[sequence.request.id]
        del siblings[sequence.index]
        if not siblings:
            del self._live[sequence.request.id]

    def _checked(self) -> IntegrityReport:
        scheduler, problem = self._core.scheduler, ""
        try:
            scheduler.integrity()
        except PhonographError as error:
            problem = str(error)
        return IntegrityReport(problem, scheduler.counts, scheduler.limits.num_pages - 1)


def ready(llm: LLM) -> Ready:
    """What the front is told of an engine that is loaded."""
    config = llm.checkpoint.config
    return Ready(
        limits=llm.limits,
        vocab=config.vocab,
        source=llm.checkpoint.source,
        architecture=config.architecture,
        num_layers=config.num_layers,
        implementation=llm.implementation,
        dtype=str(llm.executor.model.dtype).removeprefix("torch."),
        device=llm.where,
        plan=llm.plan.explain(),
        captured=tuple(str(report) for report in llm.reports if report.rows),
        coverage="\n".join(
            [
                *(runner.explain() for runner in llm.executor.runners.values()),
                *llm.executor.coverage_lines(),
            ]
        ),
        checks=llm.checks,
        speculation=_speculation_info(llm),
    )


def _speculation_info(llm: LLM) -> SpeculationInfo | None:
    drafting = llm.drafting
    if drafting is None:
        return None
    return SpeculationInfo(drafting.name, drafting.depth, str(llm.core.scheduler.width), drafting.why)


class _ToFront(logging.Handler):
    """A logging handler that sends records to the front, for its log and status page."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record).encode(errors="backslashreplace").decode()
            self._channel.send(msgspec.msgpack.encode(Logged(record.levelno, text)))
        except EOFError:
            pass  # no front is left to read it
        except Exception:
            self.handleError(record)


def _log_to(channel: Channel) -> None:
    log.addHandler(_ToFront(channel))
    log.propagate = False


def serve(channel: Channel) -> int:
    """Build the engine that the front orders and run it; returns the exit status."""
    encode = msgspec.msgpack.Encoder().encode
    _log_to(channel)

    def progress(doing: str, done: int, total: int) -> None:
        channel.send(encode(LoadProgress(doing, done, total)))

    try:
        arguments: EngineArguments = pickle.loads(channel.receive_one())
        try:
            llm = arguments.open(progress)
        except PhonographError as error:
            channel.send(encode(Failed(str(error))))
            return 2
        llm.core.prepare_grammars()
        channel.send(encode(ready(llm)))
        # What was loaded stays: exempt it from garbage collection.
        gc.collect()
        gc.freeze()
        CoreLoop(llm.core, channel).run()
    except EOFError:
        return 0
    except Exception as error:
        log.exception("the engine core can't continue")
        channel.send(encode(Failed(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def end_with(sock: socket.socket) -> None:
    """End this process as soon as the other end of the socket is closed, whatever it is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # a hang-up is reported without being registered for
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main() -> int:
    """`python -m phonograph.engine.process.core_loop FD LEVEL`: the socket that was inherited, and what is logged."""
    # A Ctrl-C or SIGTERM to the whole group is handled by the front, which tells this process when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=int(sys.argv[2]), format="%(asctime)s %(levelname)s core: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        end_with(sock)
        return serve(Channel(sock))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # without waiting for a grammar that is still being compiled
