"""StepBudget: how much of prompts a step has room for: tokens, and among them tokens that more is wanted of."""

from __future__ import annotations

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk


class StepBudget:
    """What is left of a step while its chunks are planned.

    A prompt that is scored needs a place for each of its tokens, as what samples needs one; so does one whose hidden
    states are wanted. There are more places than sequences can sample after, so that such a prompt always goes on.
    """

    def __init__(self, limits: Limits, num_decodes: int, width: int, num_prompts: int) -> None:
        """For a step with so many decodes of this width, and so many prompts at most that may end in it."""
        decoding = num_decodes * width
        self.tokens = limits.max_tokens - decoding
        self.places = limits.num_places - decoding - min(num_prompts, limits.max_seqs - num_decodes)

    def room(self, sequence: Sequence) -> int:
        """Tokens that the step can compute of a sequence's prompt."""
        each = sequence.places_per_token
        return min(self.tokens, self.places // each) if each else self.tokens

    def spent_on(self, chunk: Chunk) -> Chunk:
        """The chunk, once what it takes is taken."""
        self.tokens -= len(chunk.tokens)
        self.places -= len(chunk.targets) + chunk.num_stated
        return chunk
