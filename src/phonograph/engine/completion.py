"""Completion: the result of one sequence, and who follows it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phonograph.engine.requests.hidden_states import states_of
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import PromptLogprob, Sequence, TokenLogprob
from phonograph.engine.text import StopStrings, TextReader, Tokenizer


@dataclass
class Completion:
    """The result of one sequence."""

    prompt: tuple[int, ...]
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each token, where they were requested."""
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """One for each token of the prompt but the first, where they were requested."""
    hidden_states: npt.NDArray[np.float32] | None = None
    """[any, hidden], where they were requested, once it has ended: of each token what it was picked from; or of every
    position of prompt and output but the last."""
    text: str = ""
    finish: FinishReason | None = None
    error: str = ""


class CompletionReader:
    """Follows one sequence: its result so far."""

    def __init__(self, sequences: Many[Sequence], index: int, tokenizer: Tokenizer | None, *, continues: bool) -> None:
        """Of the sequences of a request, the one with this index; what is known of their prompt, the first has."""
        self.sequence = sequence = sequences[index]
        self._prompt_states = sequences[0].prompt_states
        self.done = Completion(sequence.request.prompt, sequence.index)
        params, after = sequence.request.params, sequence.request.prompt if continues else ()
        stops, is_guided = StopStrings(params.stop), params.grammar is not None
        self._text = TextReader(
            tokenizer,
            stops,
            stop_ids=sequence.stop_ids,
            after=after,
            verbatim=is_guided,
            min_tokens=params.min_tokens,
        )

    def take(self, tokens: tuple[int, ...], finish: FinishReason | None) -> tuple[str, bool]:
        """New text that is safe to show, and whether a stop string was hit."""
        text, widths, hit = self._text.take(tokens, is_last=finish is not None)
        self.done.tokens += tokens[: len(widths)]
        self.done.logprobs += self.sequence.logprobs[len(self.done.logprobs) : len(self.done.tokens)]
        self.done.text += text
        if hit or finish is not None:
            self.done.finish = FinishReason.STOP if hit else finish
            self.done.error = self.sequence.error
            self.done.hidden_states = states_of(self.sequence, self._prompt_states, len(self.done.tokens))
        return text, hit
