"""Generation: a request as the front sees it: text is added with every step, and taken whenever its reader is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from phonograph.engine.process import messages
from phonograph.engine.process.observer import Observer
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import PromptLogprob, TokenLogprob
from phonograph.engine.text import StopStrings, TextReader, Tokenizer
from phonograph.engine.text.reader import TextForm


@dataclass(slots=True)
class Delta:
    """What is new of one choice since the last `take`."""

    choice: int
    """Which prompt and which of its n sequences: `prompt * n + index`."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    """What went wrong, for FinishReason.ERROR."""
    error_field: str = ""
    """The field of the request that is at fault, where one is."""
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """Of further tokens of the prompt, from the second on."""
    embedding: bytes = b""
    """Of an embedded prompt, its vector in float32."""
    widths: list[int] = field(default_factory=list)
    """Characters that each token completes; the text may have them only later, or, after a stop string, never."""
    hidden_state: bytes = b""
    """Where the request wants it, the hidden state that the latest of the tokens was picked from, in float32."""


@dataclass(slots=True, eq=False)
class _Choice:
    """One sequence, from the front's side."""

    number: int
    request: Request
    reader: TextReader
    num_tokens: int = 0
    cached: int = 0
    drafts: tuple[int, int] = (0, 0)
    """As in `TokenUsage`."""
    last: float = 0.0
    """When its latest tokens came."""
    finish: FinishReason | None = None


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of a request, over all of its prompts and choices."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    """Tokens that were drafted, and verified by the model."""
    accepted_tokens: int = 0
    """Those of them that are part of an output."""


class Generation:
    """All choices of one or several prompts. Iterate, or `take` all that is new; leaving early cancels the rest.

    What is not taken yet is kept as one delta for each choice, so a slow reader costs at most its own output.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        observer: Observer,
        on_close: Callable[[Generation, int], None],
        *,
        eos_ids: Sequence[int],
        continues: bool = False,
        kept_ids: Collection[int] = (),
        form: TextForm = TextForm(),
    ) -> None:
        """`continues`: outputs go on where their prompts end; `kept_ids`: special tokens that are text in them."""
        self.requests = tuple(requests)
        self._first = {request.id: place * request.params.n for place, request in enumerate(requests)}
        """The number of each request's first choice."""
        stops = StopStrings(requests[0].params.stop if requests else ())
        self._choices = [
            _Choice(
                first + index,
                request,
                TextReader(
                    tokenizer,
                    stops.again(),
                    stop_ids=request.params.stop_ids(eos_ids),
                    kept_ids=kept_ids,
                    after=request.prompt if continues else (),
                    verbatim=request.params.grammar is not None,
                    min_tokens=request.params.min_tokens,
                    form=form,
                ),
            )
            for request, first in zip(requests, self._first.values(), strict=True)
            for index in range(request.params.n)
        ]
        self._left = len(self._choices)
        self._pending: dict[int, Delta] = {}
        self._wants_all = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._observer = observer
        self._on_close = on_close

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_left(self) -> int:
        """Choices that have not ended."""
        return self._left

    @property
    def usage(self) -> TokenUsage:
        """So far."""
        n = len(self._choices) // len(self.requests)
        return TokenUsage(
            sum(len(request.prompt) for request in self.requests),
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.cached for choice in self._choices[::n]),
            *(sum(choice.drafts[place] for choice in self._choices) for place in (0, 1)),
        )

    # -- for the reader ---------------------------------------------------------------------------------------------

    async def take(self) -> list[Delta]:
        """Everything new, at least one delta; nothing once all choices have ended and were taken."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._left:
                return []
            await self._news()
        found = list(self._pending.values())
        self._pending.clear()
        return found

    async def whole(self) -> list[Delta]:
        """Every choice as one delta, once all have ended; without those that were closed before a token came."""
        self._wants_all = True
        while self._left:
            await self._news()
        if self._error is not None:
            raise self._error
        return [self._pending[number] for number in sorted(self._pending)]

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def close(self) -> None:
        """Cancel choices that have not ended; a waiting reader gets nothing more."""
        num_left = self._left
        if num_left:
            for choice in self._choices:
                self._end(choice, FinishReason.CANCELLED)
            self._on_close(self, num_left)
            self._wake()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        found = await self.take()
        if not found:
            raise StopAsyncIteration
        for delta in found[1:]:
            self._pending[delta.choice] = delta
        return found[0]

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for the receiver of the core's outputs ---------------------------------------------------------------------

    def put(self, output: messages.Output, now: float) -> bool:
        """Take in the core's output of one sequence; True if its text has just reached a stop string."""
        choice = self._choices[self._first[output.request_id] + output.index]
        if choice.finish is not None:
            return False
        if output.tokens:
            self._time(choice, now)
        text, widths, hit = choice.reader.take(output.tokens, is_last=output.finish is not None)
        count = len(widths)
        choice.num_tokens += count
        drafts = _up_to_stop(choice.drafts, output.drafts, count) if hit else output.drafts
        choice.cached, choice.drafts = output.cached, drafts
        finish = FinishReason.STOP if hit else output.finish
        if output.prompt_logprobs:
            self._put_scores(choice, output.prompt_logprobs)
        delta = self._delta(choice.number)
        delta.text += text
        delta.tokens += output.tokens[:count]
        delta.widths += widths
        delta.logprobs += output.logprobs[:count]
        if output.states and count:
            size = len(output.states) // len(output.tokens)
            delta.hidden_state = output.states[(count - 1) * size : count * size]
        if finish is not None:
            delta.finish, delta.error, delta.error_field = finish, output.error, output.field
            delta.embedding = output.embedding
            self._end(choice, finish, now)
        if not self._wants_all or not self._left:
            self._wake()
        return hit and output.finish is None

    def _delta(self, number: int) -> Delta:
        """What is not taken yet of a choice."""
        delta = self._pending.get(number)
        if delta is None:
            delta = self._pending[number] = Delta(number)
        return delta

    def _put_scores(self, first: _Choice, scores: Sequence[PromptLogprob]) -> None:
        """Of a prompt, for all of its choices: none of them has a token before all scores are there."""
        for choice in self._choices[first.number : first.number + first.request.params.n]:
            if choice.finish is None:
                self._delta(choice.number).prompt_logprobs += scores

    def fail(self, error: Exception, now: float) -> None:
        """End everything: the reader gets the error, once what came before is taken."""
        self._error = error
        for choice in self._choices:
            self._end(choice, FinishReason.ERROR, now)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _time(self, choice: _Choice, now: float) -> None:
        if choice.last:
            self._observer.token_gap(now - choice.last)
        else:
            self._observer.first_token(now - choice.request.arrival)
        choice.last = now

    def _end(self, choice: _Choice, finish: FinishReason, now: float | None = None) -> None:
        if choice.finish is not None:
            return
        choice.finish = finish
        self._left -= 1
        seconds = (time.monotonic() if now is None else now) - choice.request.arrival
        self._observer.finished(finish, len(choice.request.prompt), choice.num_tokens, choice.cached, seconds)


def _up_to_stop(before: tuple[int, int], after: tuple[int, int], count: int) -> tuple[int, int]:
    """Drafts of an output that a stop string ends after so many tokens of its last round: as at a stop token, those in
    the last token's place and after it are neither accepted nor rejected."""
    room = max(0, count - 1)
    return before[0] + min(after[0] - before[0], room), before[1] + min(after[1] - before[1], room)
