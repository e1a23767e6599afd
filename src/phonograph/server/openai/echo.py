"""Echo: a prompt at the beginning of its completions, with text offsets for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phonograph.engine.text import Tokenizer
from phonograph.engine.text.detokenizer import LeadingSpaces
from phonograph.engine.text.reader import id_text
from phonograph.server.http.bodies import OffLoop
from phonograph.server.openai.logprobs import TextOffsets


def echo_text(tokenizer: Tokenizer | None, given: str | Sequence[int]) -> str:
    """The text shown for a prompt: as it was sent, or decoded from all of its token ids."""
    if isinstance(given, str):
        return given
    return "".join(map(id_text, given)) if tokenizer is None else tokenizer.decode(given, skip_special=False)


class Echo:
    """One echo of a prompt. Offsets are computed as entries are written: those of a long prompt take a while."""

    def __init__(self, tokenizer: Tokenizer | None, text: str, tokens: Sequence[int]) -> None:
        self.text = text
        self.tokens = tokens
        self.num_placed = 0
        self._tokenizer = tokenizer
        self._offsets = TextOffsets(None if tokenizer is None else LeadingSpaces(tokenizer))

    def place(self, count: int) -> list[int]:
        """Text offsets of the next tokens; special tokens that the tokenizer added have no width."""
        found = [self._place(token) for token in self.tokens[self.num_placed : self.num_placed + count]]
        self.num_placed += len(found)
        return found

    def _place(self, token: int) -> int:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return self._offsets.after(id_text(token).encode())
        written = tokenizer.token_bytes(token)
        is_special = token in tokenizer.special_ids
        if is_special and not self.text.startswith(written.decode("utf-8", "replace"), self._offsets.end):
            written = b""
        return min(self._offsets.after(written), len(self.text))


async def echoes(
    off_loop: OffLoop,
    tokenizer: Tokenizer | None,
    given: Sequence[str | Sequence[int]],
    prompts: Sequence[Sequence[int]],
    n: int,
) -> Callable[[int], Echo]:
    """A factory for the echo of each choice: n per prompt, given the prompts' tokens."""
    size = sum(len(prompt) for prompt in given if not isinstance(prompt, str))
    texts = await off_loop(size, lambda: [echo_text(tokenizer, prompt) for prompt in given])
    return lambda choice: Echo(tokenizer, texts[choice // n], prompts[choice // n])
