"""LLM: a model in the caller's process, from text to text."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from phonograph.devices import Device, open_device
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.checkpoints.base import Checkpoint
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.choices import attention_for, kernels_for, sampler_for
from phonograph.engine.core import EngineCore
from phonograph.engine.executor import Executor
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.loading import load_weights
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes import is_recorded
from phonograph.engine.request import FinishReason, Request, SamplingParams
from phonograph.engine.scheduler import Scheduler
from phonograph.engine.sequence import Sequence, TokenLogprob
from phonograph.engine.sizing import cache_size, limits_for, plan_for
from phonograph.engine.text import ChatTemplate, TextReader, Tokenizer
from phonograph.engine.text.guidance import Guidance
from phonograph.errors import CheckpointError, RequestError
from phonograph.graphs.config import Ask, Asked
from phonograph.graphs.progress import Progress, silent

log = logging.getLogger("phonograph")

Message = Mapping[str, object]


@dataclass
class Completion:
    """What became of one sequence."""

    prompt: tuple[int, ...]
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each token, where they were asked for."""
    text: str = ""
    finish: FinishReason | None = None
    error: str = ""


class _Reader:
    """Follows one sequence: what became of it so far."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.done = Completion(sequence.request.prompt, sequence.index)
        self._text = TextReader(tokenizer, sequence.request.params.stop)

    def take(self, tokens: tuple[int, ...], finish: FinishReason | None) -> tuple[str, bool]:
        """New text that is safe to show, and whether a stop string was hit."""
        self.done.tokens += tokens
        self.done.logprobs += self.sequence.logprobs[len(self.done.logprobs) : len(self.done.tokens)]
        text, hit = self._text.take(tokens, is_last=finish is not None)
        self.done.text += text
        if hit or finish is not None:
            self.done.finish = FinishReason.STOP if hit else finish
            self.done.error = self.sequence.error
        return text, hit


def _as_prompts(prompts: object) -> list[Any]:
    """Texts, or lists of token ids; refuses what is neither."""
    many: list[Any] = (
        [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Iterable) else [prompts]
    )
    for prompt in many:
        if not isinstance(prompt, str | Iterable) or getattr(prompt, "ndim", 1) != 1:
            raise RequestError(
                "prompts are a text, a list of texts, or a list of prompts that are lists of token ids each, as "
                f"[[1, 2, 3]]; found {type(prompt).__name__} where a prompt belongs."
            )
    return many


class LLM:
    """`LLM().generate("…")`: the embedded default model, or a folder or GGUF file."""

    def __init__(
        self,
        model: str | Path | Checkpoint | None = None,
        *,
        device: str | Device | None = None,
        options: EngineOptions = EngineOptions(),
        asked: Asked | Many[Ask] = (),
        progress: Progress = silent,
    ) -> None:
        self.checkpoint = open_checkpoint(model) if model is None or isinstance(model, str | Path) else model
        self.device = open_device(device)
        self.options = options
        self.plan = plan_for(self.device, asked, options, on_cpu_by_default=device in (None, "cpu"))
        for warning in self.plan.warnings:
            log.warning("%s", warning)
        attention = attention_for(self.device, options, self.plan, progress)
        self.tokenizer = None if isinstance(self.checkpoint, RandomCheckpoint) else self.checkpoint.tokenizer()
        config, on = self.checkpoint.config, self.device.torch_device
        dtype = options.dtype or (torch.float32 if on.type == "cpu" else torch.bfloat16)
        eos_ids = self.tokenizer.eos_ids if self.tokenizer else config.eos_ids
        limits = limits_for(options, self.device, self.plan, config.max_len, eos_ids)
        weights = load_weights(self.checkpoint, dtype, on, progress)
        self.kernels = kernels_for(self.device, options, self.plan, progress)
        for number, matrix in enumerate(matrices := weights.matrices, 1):
            self.kernels.prepare(matrix)
            progress("preparing matrices", number, len(matrices))
        decoder = Decoder(config, weights, attention, self.kernels, limits.max_len)
        sampler = sampler_for(self.device, options, self.plan)
        self.cache_size = cache_size(decoder, sampler, self.device, self.plan, limits, options, progress)
        self.limits = replace(limits, num_pages=self.cache_size.num_pages)
        self.executor = Executor(
            decoder, sampler, self.device, self.plan, self.limits, eager_copies=options.eager_copies
        )
        self.reports = self.executor.capture(progress)
        scheduler = Scheduler(self.limits, prefix_cache=options.prefix_cache, mixed=options.mixed)
        grammars = Guidance(self.tokenizer) if self.tokenizer is not None else None
        self.core = EngineCore(scheduler, self.executor, grammars)
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    def generate(
        self, prompts: str | Many[str] | Many[Many[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete prompts, texts or token ids; results in the order of the prompts, n for each."""
        many = _as_prompts(prompts)
        with self._alone():
            readers = self._submit([self._encoded(prompt) for prompt in many], params or SamplingParams())
            for _ in self._run(readers):
                pass
        return [reader.done for reader in readers.values()]

    def chat(self, messages: Many[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation."""
        return self.generate([self._rendered(messages)], params)[0]

    def stream(self, prompt: str | Many[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, as it comes."""
        with self._alone():
            readers = self._submit([self._encoded(prompt)], params or SamplingParams())
            for _, text in self._run(readers):
                if text:
                    yield text

    def stream_chat(self, messages: Many[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to a conversation, as it comes."""
        return self.stream(self._rendered(messages), params)

    @property
    def where(self) -> str:
        """The device, in words; a CPU on which nothing is recorded emulates nothing."""
        on = self.device.torch_device
        return f"{self.device.name} ({on})" if on.type != "cpu" or is_recorded(self.plan) else "cpu"

    def explain(self) -> str:
        """The plan, and what every phase has captured and counted."""
        runners = "\n".join(runner.explain() for runner in self.executor.runners.values())
        cache = (
            f"KV cache: {self.limits.capacity:,} tokens in pages of {self.limits.page_size}: {self.cache_size.reason}"
        )
        kernels = f"kernels: {'; '.join([self.kernels.name, *self.kernels.notes])}"
        kernels += f"\nattention: {self.executor.model.attention.name}"
        return f"{self.plan.explain(phases=list(self.executor.runners))}\n{kernels}\n{cache}\n{runners}"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One caller at a time: what a second one's steps bring would be lost for the first."""
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "this LLM is generating for somebody else, a stream that is open or another thread. Finish or close "
                "that first, or take AsyncLLM, which serves many at once."
            )
        try:
            yield
        finally:
            self._turn.release()

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise CheckpointError(f"{self.checkpoint.source} has no tokenizer: give token ids.")
        return self.tokenizer

    def _encoded(self, prompt: str | Many[int]) -> tuple[int, ...]:
        return tuple(self._text().encode(prompt)) if isinstance(prompt, str) else tuple(map(operator.index, prompt))

    def chat_length(self, messages: Many[Message]) -> int:
        """How many tokens a conversation has, as the model gets it."""
        return len(self._rendered(messages))

    def _rendered(self, messages: Many[Message]) -> tuple[int, ...]:
        template: ChatTemplate = self.checkpoint.chat_template()
        return tuple(self._text().encode(template.render(list(messages)), add_special=False))

    def _submit(self, prompts: Many[tuple[int, ...]], params: SamplingParams) -> dict[Sequence, _Reader]:
        readers: dict[Sequence, _Reader] = {}
        try:
            for prompt in prompts:
                request = Request(f"request-{next(self._numbers)}", prompt, params, arrival=time.monotonic())
                for sequence in self.core.add(request):
                    readers[sequence] = _Reader(sequence, self.tokenizer)
        except Exception:
            for sequence in readers:
                self.core.cancel(sequence.request.id)
            raise
        return readers

    def _run(self, readers: dict[Sequence, _Reader]) -> Generator[tuple[Sequence, str], None, None]:
        """Step until all are done; a caller that stops listening cancels what is left."""
        left = set(readers)
        try:
            while left:
                for sequence, tokens, finish in self.core.step():
                    if sequence not in left:
                        continue
                    text, hit = readers[sequence].take(tokens, finish)
                    if hit and finish is None:
                        self.core.finish(sequence, FinishReason.STOP)
                    if hit or finish is not None:
                        left.discard(sequence)
                    yield sequence, text
        finally:
            for sequence in left:
                self.core.cancel(sequence.request.id)
            while not self.core.is_idle:
                self.core.step()
