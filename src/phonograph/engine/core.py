"""Engine core: schedule, execute, commit, report."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from phonograph.engine.execution.shadow import MistrustedStepError
from phonograph.engine.execution.step_builder import StepBuilder, StepTables
from phonograph.engine.passes.step import Step, Undone
from phonograph.engine.requests.constraints import Constraint, GrammarCompiler
from phonograph.engine.requests.hidden_states import joined_states, note_states, take_prompt_states
from phonograph.engine.requests.prompt_scoring import joined_scores, take_scores
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence, TokenLogprob
from phonograph.engine.requests.step import Sampled, ScheduledStep, TokenDetails, Update
from phonograph.engine.requests.token_masks import TokenMasks, constrained
from phonograph.engine.requests.vectors import add_sums, joined_sums
from phonograph.engine.scheduling.admission import refuse_hidden_states, refuse_pooling, refuse_unknown_tokens
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.speculation_tally import SpeculationTally
from phonograph.errors import CoverageError, RequestError
from phonograph.graphs.phases.decisions import Reason

log = logging.getLogger("phonograph")


class StepExecutor(Protocol):
    """What runs steps: an `Executor`, or a client that sends them to one."""

    @property
    def vocab(self) -> int: ...

    @property
    def step_tables(self) -> StepTables: ...

    def launch(self, step: Step) -> Any:
        """Start a step; returns a handle for `collect`. Each is launched once, in the order of building."""
        ...

    def collect(self, launched: Any) -> Sampled:
        """The sampled tokens of a step; waits for it. Each step is collected once, in launch order."""
        ...

    def put_back(self, undone: Undone) -> None:
        """Undo what a step that raised has written to the tables."""
        ...

    def heartbeat(self) -> None:
        """A heartbeat pass; raises if the device does not respond."""
        ...


E = TypeVar("E", bound=StepExecutor)


class EngineCore(Generic[E]):
    """Owns the scheduler and the executor; commit lags launch by up to `max_ahead` steps."""

    def __init__(self, scheduler: Scheduler, executor: E, grammars: GrammarCompiler | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        tables = executor.step_tables
        tables.check(scheduler.passes, shares_prompts=scheduler.shares_prompts)
        self._steps = StepBuilder(tables)
        self._gives_states = any(one.gives_states for one in tables.passes)
        self._grammars = grammars
        self.speculation = SpeculationTally(scheduler.limits.tokens_per_row - 1)
        self._in_flight: deque[tuple[ScheduledStep, Any]] = deque()
        """Steps in flight with their handles, or with their sampled tokens."""
        self._news: list[Update] = []
        self.on_prompts: Callable[[ScheduledStep, float], None] | None = None
        """Told of each step that computes parts of prompts, once it is launched, and when that began."""

    def add(self, request: Request, constraints: Many[Constraint] | None = None) -> list[Sequence]:
        """Add a request; refused with the reason if it can't be served. Its constraints may be compiled already."""
        refuse_unknown_tokens(request, self.executor.vocab)
        self._steps.honoured.refuse_others(request)
        refuse_pooling(request, embeddings=self.scheduler.passes.embeds is not None)
        refuse_hidden_states(request, given=self._gives_states)
        if constraints is None:
            constraints = self.constraints(request)
        vocab = self.executor.vocab
        constraints = constrained(request, vocab, constraints)
        masks = TokenMasks.of(request, vocab, self.scheduler.limits.eos_ids)
        sequences = self.scheduler.add(request)
        for sequence in sequences:
            sequence.masks = masks
        for sequence, constraint in zip(sequences, constraints, strict=False):
            sequence.constraint = constraint
        return sequences

    def constraints(self, request: Request) -> Many[Constraint]:
        """One for each sequence of a request with a grammar. Slow; may run on any thread."""
        grammar = request.params.grammar
        if grammar is None:
            return []
        if self._grammars is None:
            problem = "without a tokenizer no grammar can be followed. Leave it out."
            raise RequestError(f"request {request.id}: {problem}", field=grammar.field)
        try:
            return self._grammars.start(grammar, request.params.n)
        except (RequestError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of the Rust library is one, and must not end all other requests
            log.warning("compiling a %s grammar failed: %s: %s", grammar.kind, type(error).__name__, error)
            problem = f"the {grammar.kind} grammar can't be compiled: it is too complex. Change it."
            raise RequestError(problem, field=grammar.field) from error

    def prepare_grammars(self) -> None:
        """Build what all grammars share, so that the first request with one need not wait for it."""
        if self._grammars is not None:
            self._grammars.prepare()

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its pages are free once its last launched step is committed."""
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
            begun = time.monotonic() if step.prefills else 0.0
            launched = self._execute(step)
            if step.prefills and self.on_prompts is not None:
                self.on_prompts(step, begun)
            if launched is not None:
                self._in_flight.append((step, launched))
        if self._in_flight and (step is None or len(self._in_flight) > self.scheduler.limits.max_ahead):
            self._commit(*self._in_flight[0])
            self._in_flight.popleft()
        news, self._news = self._news, []
        return news

    def heartbeat(self) -> None:
        """Run a heartbeat pass; raises if the device does not respond any more."""
        self.executor.heartbeat()

    def _commit(self, step: ScheduledStep, launched: Any) -> None:
        if isinstance(launched, Sampled):
            sampled = launched
        else:
            sampled = self.executor.collect(launched)
            self._in_flight[0] = step, sampled  # nothing is collected twice, should the commit raise
        if sampled.tokens and max(sampled.tokens) >= self.executor.vocab:
            for sequence, problem in sampled.outside(step, self.executor.vocab):
                self._news += self.scheduler.fail(sequence, problem)
        scored = self._take_in(step, sampled) if step.prefills else ()
        updates = self.scheduler.commit(step, sampled)
        if self.scheduler.limits.tokens_per_row > 1:
            probed = self.speculation.note(step, updates, sampled)
            self.scheduler.width.took(step, updates, probed)
        for place, (sequence, tokens, finish) in enumerate(list(updates)):
            if sequence.constraint is not None and tokens and finish is None:
                followed, ended = self._follow(sequence, tokens)
                updates[place] = sequence, followed, finish
                updates += ended
        if sampled.logprobs is not None or sampled.states is not None:
            _note_details(step, sampled, {sequence: len(tokens) for sequence, tokens, _ in updates if tokens})
        if scored:
            reported = {sequence for sequence, _, _ in updates}
            self._news += [(sequence, (), None) for sequence in scored if sequence not in reported]
        self._news += updates

    def _take_in(self, step: ScheduledStep, sampled: Sampled) -> Many[Sequence]:
        """Keep what a step brought of prompts; returns whose scores are among it."""
        scored, failed = take_scores(step, sampled)
        if sampled.pooled is not None:
            failed += add_sums(step, sampled.pooled)
        if self._gives_states:
            failed += take_prompt_states(step, sampled)
        for sequence, problem in failed:
            self._news += self.scheduler.fail(sequence, problem)
        return scored

    def _follow(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], list[Update]]:
        """Advance the grammar of a sequence; a sequence whose grammar allows no token fails."""
        assert sequence.constraint is not None
        for place, token in enumerate(tokens, 1):
            try:
                sequence.constraint.accept(token)
            except RequestError as error:
                del sequence.outputs[len(sequence.outputs) - len(tokens) + place :]
                sequence.error_field = error.field or ""
                return tokens[:place], self.scheduler.fail(sequence, str(error))
        return tokens, []

    def _execute(self, step: ScheduledStep) -> Any:
        """The handle of a step, or its sampled tokens; None where its replay was found wrong."""
        try:
            return self._launched(step)
        except BaseException:
            # A Ctrl-C: how far the step got is unknown. It and its sequences end; the engine goes on.
            self.scheduler.rows.tell_again(step.page_updates)
            for sequence in step.sequences:
                self._news += self.scheduler.fail(sequence, "interrupted")
            self._in_flight.append((step, _joined([None] * len(step.sampling))))
            raise

    def _launched(self, step: ScheduledStep) -> Any:
        try:
            return self._launched_somehow(step)
        except MistrustedStepError as error:
            log.error("step %d is computed again: %s", step.number, error)
            self._drop(step)
            return None

    def _launched_somehow(self, step: ScheduledStep) -> Any:
        """The whole step, or sequence by sequence where that raises; a wrong replay is raised from either."""
        try:
            return self._launch(step)
        except MistrustedStepError:
            raise
        except Exception as error:
            if isinstance(error, CoverageError) and error.reason == Reason.MISTRUSTED.value:
                return self._refused(step, error)
            log.warning(
                "step %d failed (%s: %s); trying its sequences one by one", step.number, type(error).__name__, error
            )
        # These include pages of sequences that are not in the step, and that may run after all of these have failed.
        self.scheduler.rows.tell_again(step.page_updates)
        return self._execute_singly(step)

    def _refused(self, step: ScheduledStep, error: CoverageError) -> Sampled:
        """Fail all sequences of a step whose recording was found wrong, where no step may be eager.

        One by one they might fit other recordings: a pass per sequence at every step from here on, silently, for users
        who asked for strict graphs.
        """
        log.error("step %d fails: %s", step.number, error)
        self.scheduler.rows.tell_again(step.page_updates)
        while self._in_flight:
            self._commit(*self._in_flight[0])
            self._in_flight.popleft()
        for sequence in step.sequences:
            self._news += self.scheduler.fail(sequence, f"{CoverageError.__name__}: {error}")
        return _joined([None] * len(step.sampling))

    def _launch(self, step: ScheduledStep, *, collects: bool = False) -> Any:
        """The handle of a step, or with `collects` its sampled tokens; a step that raises is abandoned."""
        last = self._steps.last
        try:
            launched = self.executor.launch(self._steps.build(step))
            return self.executor.collect(launched) if collects else launched
        except BaseException:
            self._steps.give_up_after(last)
            raise

    def _drop(self, step: ScheduledStep) -> None:
        """Discard the results of a step; its sequences are computed again from their committed tokens."""
        self.scheduler.rows.tell_again(step.page_updates)
        while self._in_flight:
            self._commit(*self._in_flight[0])
            self._in_flight.popleft()
        self.scheduler.drop(step)

    def _execute_singly(self, step: ScheduledStep) -> Sampled:
        """One pass per sequence: one that raises is failed, the others go on.

        Steps in flight are committed first: so many passes would use up the host memory for results. And the host must
        know all tokens up to here, since the rows of the failed step are restored first.
        """
        while self._in_flight:
            self._commit(*self._in_flight[0])
            self._in_flight.popleft()
        found: dict[Sequence, Sampled] = {}
        for part in _parts(step):
            try:
                self.executor.put_back(self._steps.undone(part))
                sampled = self._launch(part, collects=True)
            except MistrustedStepError:
                raise  # the recording is at fault, not a request
            except Exception as error:
                self._news += self.scheduler.fail(part.sequences[0], f"{type(error).__name__}: {error}")
                continue
            found[part.sequences[0]] = sampled
        scores = joined_scores(step, [found.get(chunk.sequence) for chunk in step.prefills])
        sums = joined_sums([found.get(chunk.sequence) for chunk in step.pooling])
        picked = [found.get(sequence) for sequence in step.sampling]
        states = joined_states([(1, None) if part is None else (len(part.tokens), part.states) for part in picked])
        stated = [(chunk.num_stated, found.get(chunk.sequence)) for chunk in step.prefills if chunk.num_stated]
        prompts = joined_states([(count, None if part is None else part.prompt_states) for count, part in stated])
        return replace(_joined(picked), scores=scores, pooled=sums, states=states, prompt_states=prompts)


def _joined(parts: list[Sampled | None]) -> Sampled:
    """What passes of one sequence each sampled; the token of one that failed means nothing, and commit drops it."""
    found = [part if part is not None else Sampled([0]) for part in parts]
    tokens = [token for part in found for token in part.tokens]
    counts = [len(part.tokens) for part in found] if any(part.counts is not None for part in found) else None
    drafted = [sum(part.drafted or ()) for part in found] if any(part.drafted for part in found) else None
    if not any(part.logprobs for part in found):
        return Sampled(tokens, counts, drafted=drafted)
    nothing: TokenDetails = (0.0, [], [])
    likely = [one for part in found for one in part.logprobs or [nothing] * len(part.tokens)]
    return Sampled(tokens, counts, likely, drafted=drafted)


def _note_details(step: ScheduledStep, sampled: Sampled, committed: dict[Sequence, int]) -> None:
    """Keep what else there is of tokens, of as many as each sequence took."""
    if sampled.logprobs is not None:
        _note_logprobs(step, sampled, committed)
    if sampled.states is not None:
        note_states(step, sampled, committed)


def _note_logprobs(step: ScheduledStep, sampled: Sampled, committed: dict[Sequence, int]) -> None:
    """Keep them for as many tokens as each sequence took."""
    assert sampled.logprobs is not None
    for sequence, part in zip(step.sampling, sampled.by_row(), strict=True):
        num_top = sequence.request.params.logprobs
        if num_top is None:
            continue
        taken = slice(part.start, part.start + committed.get(sequence, 0))
        for token, (own, ids, values) in zip(sampled.tokens[taken], sampled.logprobs[taken], strict=True):
            top = tuple(zip(ids[:num_top], values[:num_top], strict=True))
            sequence.logprobs.append(TokenLogprob(token, own, top))


def _parts(step: ScheduledStep) -> list[ScheduledStep]:
    """The step's sequences, each in a step of its own; whether the page updates were written is unknown."""
    parts = [replace(step, decodes=(sequence,), prefills=(), probes=False) for sequence in step.decodes]
    return parts + [replace(step, decodes=(), prefills=(chunk,), probes=False) for chunk in step.prefills]
