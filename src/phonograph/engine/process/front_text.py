"""FrontText: chats rendered, texts encoded and decoded for many requests, without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from phonograph.engine.scheduling.admission import refuse_unlike_prompts
from phonograph.engine.text import ChatTemplate, ContentGuard, Tokenizer
from phonograph.engine.text.truncation import encoded_end, end_of, last_tokens
from phonograph.errors import RequestError

T = TypeVar("T")

_INLINE = 512
"""Characters, or tokens, that are handled in the event loop; more go to a thread, so that no other request waits."""
_THREADS = 2
_NICE = 10
"""Niceness of these threads: about a tenth of the CPU time that others get on a busy core."""


class FrontText:
    """The tokenizer and the chat template of one model, where it has them."""

    def __init__(self, source: str, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts", initializer=_let_others_go_first)

    @cached_property
    def _guard(self) -> ContentGuard:
        return ContentGuard(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"encoding a text: {self._source} has no tokenizer. Send token ids.", field="prompt")
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """How conversations are written out."""
        if self._template is None:
            problem = f"{self._source} has no chat template. Send a prompt of token ids."
            raise RequestError(f"rendering a chat: {problem}", field="messages")
        return self._template

    async def encode(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        add_special: bool = True,
        most: int | None = None,
        check: Callable[[Sequence[int]], None] = lambda tokens: None,
    ) -> list[Sequence[int]]:
        """The token ids of several texts; what is token ids already stays as it is. Of each the last, at most `most`,
        are taken, and `check` may refuse it."""

        def encoded(prompt: str | Sequence[int]) -> Sequence[int]:
            refuse_unlike_prompts(prompt)
            ids: Sequence[int]
            if isinstance(prompt, str):
                ids = encoded_end(self.tokenizer, prompt, most, add_special=add_special)
            else:
                ids = last_tokens(prompt, most)
            check(ids)
            return ids

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, Sized))
        return await self.off_loop(size, lambda: [encoded(prompt) for prompt in prompts])

    async def decode(self, tokens: Sequence[int], vocab: int, *, skip_special: bool = True) -> str:
        """The text of token ids, each below `vocab`."""

        def decoded() -> str:
            if (highest := max(tokens, default=0)) >= vocab:
                problem = f"{highest} is not in the vocabulary of {vocab}. Send ids below that."
                raise RequestError(f"decoding tokens: {problem}", field="tokens")
            return self.tokenizer.decode(tokens, skip_special=skip_special)

        return await self.off_loop(len(tokens), decoded)

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continues: bool = False,
        special_content: bool = False,
        add_special: bool = False,
        most: int | None = None,
        size: int = _INLINE,
    ) -> list[int]:
        """The token ids of a conversation, or of one whose last message is gone on with; the last, at most `most`.

        Special tokens that messages and tools have in their texts are text, unless `special_content`. With
        `add_special`, what the tokenizer puts around a text comes on top of what the template writes. `size` is about
        how many characters there are.
        """
        tokenizer, template = self.tokenizer, self.template

        def written(hide: Callable[[Any], Any] = lambda value: value) -> str:
            given, shown, further = hide(list(messages)), hide(tools), hide(variables)
            if continues:
                return template.continued(given, tools=shown, variables=further)
            return template.render(given, tools=shown, variables=further, add_generation_prompt=add_generation_prompt)

        def rendered() -> list[int]:
            if special_content:
                return encoded_end(tokenizer, written(), most, add_special=add_special)
            return end_of(self._guard.written(written), most, add_special=add_special)

        return await self.off_loop(size, rendered)

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Do the work at once if it is small, else in a thread; `size` is about its number of characters or tokens."""
        if size < _INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads; what waits for them is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _let_others_go_first() -> None:
    """On Linux threads have priorities of their own: a long text must not take a core from the engine's steps."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
