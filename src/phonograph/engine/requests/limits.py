"""Limits: the bounds that every step keeps: sequences, tokens, context and pages."""

from __future__ import annotations

from dataclasses import dataclass, fields

from phonograph.errors import PlanError
from phonograph.numbers import expect_whole, is_whole


@dataclass(frozen=True)
class Limits:
    """What a step, a sequence and the KV cache may hold at most."""

    max_seqs: int
    """Sequences that hold a row at the same time."""
    max_tokens: int
    """Tokens of one step; at least those of `max_seqs` decodes, so that all of them fit."""
    max_len: int
    """Tokens of one sequence, prompt and outputs together."""
    page_size: int
    """Tokens of one page."""
    num_pages: int
    """Pages of the KV cache, the null page 0 included."""
    reserve_tokens: int = 64
    """Tokens ahead of its launched length for which a sequence gets pages, but never past its last token."""
    max_ahead: int = 1
    """Steps that may be launched before their predecessor is committed."""
    chunk: int | None = None
    """Prefill tokens of one sequence in one step; None allows all of `max_tokens`."""
    patience: int = 1024
    """A sequence that has waited for this many steps goes before every priority, so that none starves."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a sequence, unless its request ignores them."""
    tokens_per_row: int = 1
    """Tokens that a step computes for a row that decodes at most, and that it can bring it. With 1 it brings just that
    one; with more, any number up to it, or none. Where it is more, a step may compute one all the same."""
    unread_places: int = 0
    """Tokens of a row that plain steps may leave unread by a drafter; with 0 it reads each in its step."""
    scored_places: int = 64
    """Tokens of prompts that a step can score, however many sequences sample in it; where fewer do, their places are
    used too. Each is a row of every mixed step's last norm, used or not."""
    is_cut_off: bool = False
    """Whether `max_len` is less than was asked for, since the KV cache holds no more."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            expect_whole(f"limits: {name}", getattr(self, name), PlanError, least=least)
        if self.chunk is not None:
            expect_whole("limits: chunk", self.chunk, PlanError, least=1)
        if not isinstance(self.eos_ids, tuple) or not all(map(is_whole, self.eos_ids)):
            raise PlanError(f"limits: eos_ids must be a tuple of token ids, found {self.eos_ids!r}.")
        if self.max_tokens < self.max_seqs * self.tokens_per_row:
            count = "one token" if self.tokens_per_row == 1 else f"{self.tokens_per_row} tokens"
            raise PlanError(
                f"limits: max_tokens is {self.max_tokens} and max_seqs is {self.max_seqs}, but a step must hold "
                f"{count} of every sequence. Raise max_tokens or lower max_seqs."
            )

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return (self.num_pages - 1) * self.page_size

    def misfit(self, num_prompt: int, max_outputs: int = 1) -> str:
        """Why a prompt of this length can't be served, and what to do; empty where it can.

        An output needs room for its first token, unless there is none to be.
        """
        if num_prompt < 1:
            return "the prompt is empty, but there must be a token to start from. Send at least one."
        most = self.longest_prompt(max_outputs)
        if num_prompt > most:
            context, longer = f"a context of {self.max_len}", "raise max_len"
            if self.is_cut_off:
                context = f"{context}, all that the KV cache holds,"
                longer = "raise cache_tokens, or give the KV cache more memory"
            room = f"{context} has room for {most}{' and an output' if max_outputs else ''}"
            return f"the prompt has {num_prompt} tokens; {room}. Shorten the prompt, or {longer}."
        if num_prompt > self.capacity:
            room = f"all {self.num_pages - 1} pages of the KV cache hold {self.capacity}"
            return f"the prompt has {num_prompt} tokens; {room}. Shorten the prompt, or give the KV cache more pages."
        return ""

    def longest_prompt(self, max_outputs: int = 1) -> int:
        """Tokens of a prompt that the context has room for, with an output if there is one to be."""
        return self.max_len - min(max_outputs, 1)

    @property
    def num_places(self) -> int:
        """Tokens of a mixed step that logits are computed for: all that something is sampled after, and some of
        prompts that are scored."""
        return self.max_seqs * self.tokens_per_row + self.scored_places

    @property
    def num_positions(self) -> int:
        """Positions that a step may compute: the last tokens of a row that decodes may lie past its end, and what is
        drafted after these; so may places for unread tokens that hold none."""
        return self.max_len + 2 * (self.tokens_per_row - 1) + self.unread_places

    @property
    def fewest_per_row(self) -> int:
        """Tokens that a step is sure to bring a row that decodes."""
        return fewest_of(self.tokens_per_row)

    @property
    def context(self) -> str:
        """The longest sequence, in words."""
        return f"{self.max_len:,} tokens" + (" (all that the KV cache holds)" if self.max_len >= self.capacity else "")

    @property
    def max_chunk(self) -> int:
        return min(self.chunk or self.max_tokens, self.max_tokens)


UNREAD_PLACES = 32
"""What engines have where a drafter reads hidden states: it runs once in so many plain steps."""


def half_width(tokens_per_row: int) -> int:
    """Tokens of a row in a round of half as many drafts, rounded down; 1 where that leaves none."""
    return 1 + (tokens_per_row - 1) // 2


def fewest_of(tokens_per_row: int) -> int:
    """Tokens that a step of this width is sure to bring a row that decodes."""
    return 1 if tokens_per_row == 1 else 0


_LEAST = {
    **{field.name: 1 for field in fields(Limits) if field.name not in ("chunk", "eos_ids", "is_cut_off")},
    "max_len": 2,
    "num_pages": 2,
    "reserve_tokens": 0,
    "max_ahead": 0,
    "unread_places": 0,
}
