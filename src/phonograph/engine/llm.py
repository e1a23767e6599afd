"""LLM: a model in the caller's process, from text to text."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phonograph.devices import Device, open_device
from phonograph.engine.cache.prefix_cache import prefix_sharing
from phonograph.engine.checkpoints import open_for
from phonograph.engine.checkpoints.base import Checkpoint, breaks_of, implementation_of
from phonograph.engine.checkpoints.generation_config import described
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.completion import Completion, CompletionReader
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.shadow import described_checks, shadowing_for
from phonograph.engine.execution.sizing import cache_size, limits_for, plan_for, with_pages
from phonograph.engine.execution.speculation import choose_drafter, described_times, passes_with, round_times
from phonograph.engine.execution.startup_verification import (
    guard_recordings,
    refuse_failures,
    refuse_findings,
    verify_recordings,
)
from phonograph.engine.kernel_selection import select_attention, select_kernels, select_sampler
from phonograph.engine.mixed_costs import step_costs
from phonograph.engine.models.interface import Model, ModelParts, Noted
from phonograph.engine.models.value_range import value_range
from phonograph.engine.ops.queries import Attention
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.registry import step_passes_for
from phonograph.engine.precision import precision_for
from phonograph.engine.requests.pooling import Pooling
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.vectors import embedding_of, normalized
from phonograph.engine.scheduling.prompts import as_params, as_prompts, as_token_ids
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import width_by
from phonograph.engine.text import ChatTemplate, ContentGuard, Tokenizer
from phonograph.engine.text.bad_words import with_bad_words
from phonograph.engine.text.guidance import Guidance
from phonograph.engine.text.stops import with_special_stops
from phonograph.errors import CheckpointError, RequestError
from phonograph.graphs.planning.resolve import Plan
from phonograph.graphs.planning.settings import Ask, Asked
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.running.runner_options import RunnerOptions

log = logging.getLogger("phonograph")

Message = Mapping[str, object]


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
        self.checkpoint = open_for(model, options) if model is None or isinstance(model, str | Path) else model
        self.device = open_device(device)
        self.precision = precision_for(self.checkpoint, options, self.device.torch_device)
        options = self.options = self.precision.applied_to(options)
        self.sampling = self.checkpoint.sampling if options.sampling == "model" else SamplingParams()
        """Defaults for values that a request leaves out."""
        self.plan = self._planned(asked, on_cpu_by_default=device in (None, "cpu"))
        shadowing = shadowing_for(options)
        attention = select_attention(self.device, options, self.plan, progress)
        self.tokenizer = None if isinstance(self.checkpoint, RandomCheckpoint) else self.checkpoint.tokenizer()
        config = self.checkpoint.config
        eos_ids = self.tokenizer.eos_ids if self.tokenizer else config.eos_ids
        chosen = choose_drafter(options, self.checkpoint)
        unread = 0 if chosen is None else chosen.unread_places
        limits = limits_for(options, self.device, self.plan, config.max_len, eos_ids, unread)
        self.kernels = select_kernels(self.device, options, self.plan, progress)
        loaded = self._loaded(attention, limits.num_positions, progress)
        sampler = select_sampler(self.device, options, self.plan)
        self.drafting = chosen.drafting(options.draft_depth, loaded, limits.num_positions) if chosen else None
        """The drafter, if there is one."""
        passes = passes_with(self.drafting, options, self.device)
        self.cache_size = cache_size(loaded, sampler, self.device, self.plan, limits, options, progress, passes)
        self.limits = with_pages(limits, self.cache_size.num_pages)
        self.executor = Executor(
            loaded,
            sampler,
            self.device,
            self.plan,
            self.limits,
            passes=passes,
            options=RunnerOptions(
                eager_copies=options.eager_copies,
                facts="off" if options.verify == "off" else "verify",
                guarded="all" if options.verify == "all" else "ends",
            ),
            shadow=shadowing,
        )
        self.reports = self.executor.capture(progress)
        if self.plan.graphs == "strict":
            self.executor.refuse_gaps()
        self.verified = verify_recordings(self.executor, options.verify, self.reports, progress)
        """What was checked before the first request, by phase."""
        refuse_failures(self.verified)
        refuse_findings(guard_recordings(self.executor, options.verify, progress), self.plan.guard)
        self.prefix_sharing = prefix_sharing(options.prefix_cache, self.executor.step_tables.prompt_state)
        self.core = self._new_core(options, progress)
        self._numbers = itertools.count()
        self._turn = threading.Lock()
        self._submitted: list[str] = []
        """Requests of the current caller, each noted before the core gets it."""

    def _new_core(self, options: EngineOptions, progress: Progress) -> EngineCore[Executor]:
        steps = step_passes_for(embeddings=options.embeddings, speculates=options.speculates)
        scheduler = Scheduler(self.limits, prefix_cache=self.prefix_sharing.is_on, mixed=options.mixed, passes=steps)
        grammars = Guidance(self.tokenizer) if self.tokenizer is not None else None
        scheduler.width = width_by(self.limits, step_costs(options, self.executor, steps, progress))
        return EngineCore(scheduler, self.executor, grammars)

    def _planned(self, asked: Asked | Many[Ask], *, on_cpu_by_default: bool) -> Plan:
        """The plan for the model, its warnings logged."""
        plan = plan_for(
            self.device,
            asked,
            self.options,
            on_cpu_by_default=on_cpu_by_default,
            architecture=self.checkpoint.config.architecture,
            breaks=breaks_of(self.checkpoint),
        )
        for warning in plan.warnings:
            log.warning("%s", warning)
        return plan

    def _loaded(self, attention: Attention, max_len: int, progress: Progress) -> Model:
        """The model, in another precision where its values don't fit the first."""
        loaded = self._model(attention, max_len, progress)
        if self.precision.fallback is not None:
            self.precision = self.precision.after(value_range(loaded, self.device))
            if loaded.dtype != self.precision.dtype:
                log.warning("%s: %s", self.checkpoint.source, self.precision)
                del loaded  # there may not be room for the weights twice
                loaded = self._model(attention, max_len, progress)
        return loaded

    def _model(self, attention: Attention, max_len: int, progress: Progress) -> Model:
        """The model with its weights, in the precision that was found."""
        parts = ModelParts(attention, self.kernels, max_len, self.precision.residual, self.options.hf_ops)
        return load_model(self.checkpoint, parts, self.precision.dtype, self.device.torch_device, progress)

    def generate(
        self, prompts: str | Many[str] | Many[Many[int]], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete prompts, texts or token ids; results in the order of the prompts, n for each. Parameters are for
        all of them, or a list with one entry for each."""
        many = as_prompts(prompts)
        each = as_params(params, len(many))
        return self._generated([self._encoded(prompt) for prompt in many], each, continues=True)

    def chat(self, messages: Many[Message], params: SamplingParams | None = None) -> Completion:
        """Generate the next message of a conversation."""
        return self._generated([self._rendered(messages)], as_params(params, 1), continues=False)[0]

    def stream(self, prompt: str | Many[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Stream the text of one completion."""
        return self._streamed(self._encoded(prompt), params, continues=True)

    def stream_chat(self, messages: Many[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Stream the next message of a conversation."""
        return self._streamed(self._rendered(messages), params, continues=False)

    def embed(
        self, prompts: str | Many[str] | Many[Many[int]], pooling: Pooling = "mean", *, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """A vector of each prompt, [num_prompts, hidden]: the hidden states after the last norm, pooled.

        Made by an engine with EngineOptions(embeddings=True). With `normalize` every vector has length 1.
        """
        many = [self._encoded(prompt) for prompt in as_prompts(prompts)]
        with self._alone():
            added = [self._added(prompt, SamplingParams(max_tokens=0), pooling)[0] for prompt in many]
            for sequence in added:  # whoever ends before the one that is waited for has its vector by then
                while sequence.finish is None:
                    self.core.step()
        vectors = [embedding_of(sequence) for sequence in added]
        vectors = [normalized(one) for one in vectors] if normalize else vectors
        return np.stack(vectors) if vectors else np.zeros((0, self.checkpoint.config.hidden), dtype=np.float32)

    @property
    def where(self) -> str:
        """The device, in words; a CPU on which nothing is recorded emulates nothing."""
        on = self.device.torch_device
        return f"{self.device.name} ({on})" if on.type != "cpu" or self.plan.is_recorded else "cpu"

    @property
    def implementation(self) -> str:
        """The model implementation, and findings of start-up."""
        said = implementation_of(self.checkpoint, self.precision.dtype, self.device.torch_device)
        model = self.executor.model
        return "; ".join([said, *(model.notes if isinstance(model, Noted) else ())])

    @property
    def checks(self) -> str:
        """How replays are compared with the eager path, in words."""
        return described_checks(self.options, is_recorded=self.executor.is_checkable)

    def explain(self) -> str:
        """The plan, and what every phase has captured and counted."""
        runners = "\n".join(runner.explain() for runner in self.executor.runners.values())
        cache = (
            f"KV cache: {self.limits.capacity:,} tokens in pages of {self.limits.page_size}: {self.cache_size.reason}"
        )
        kernels = f"precision: {self.precision}\nkernels: {'; '.join([self.kernels.name, *self.kernels.notes])}"
        kernels += f"\nattention: {self.executor.model.attention.name}"
        compiled = [name for name in self.plan.phases if self.plan.phase(name).backend == "tc_piecewise"]
        if compiled:
            kernels += (
                f"\ncompiled: {', '.join(compiled)}: layers in torch ops; attention, page writes and sampling as ever"
            )
        context = f"context: {self.limits.context}"
        drafted = "speculation: off"
        if self.drafting is not None:
            told = [f"{self.drafting}, {self.core.scheduler.width}", str(self.core.speculation.counts)]
            told.append(str(self.executor.parts.drafter_failures))
            drafted = f"speculation: {'; '.join(filter(None, [*told, described_times(round_times(self.executor))]))}"
        about = [
            self.plan.explain(),
            f"model: {self.implementation}",
            kernels,
            cache,
            str(self.prefix_sharing),
            context,
            described(self.sampling),
            self.checks,
            drafted,
        ]
        return "\n".join([*about, runners, *self.executor.coverage_lines()])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One caller at a time: a second caller's steps would consume outputs of the first. Cleans up however it ends,
        by a Ctrl-C too."""
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "this LLM is generating already: a stream is open, or another thread is at it. Finish or close that "
                "first, or use AsyncLLM, which serves many requests at once."
            )
        try:
            yield
        finally:
            try:
                self._give_up()
            finally:
                self._turn.release()

    def _give_up(self) -> None:
        """Cancel what is left of the caller's requests, and wait until the core has let go of them."""
        while self._submitted:
            self.core.cancel(self._submitted[-1])
            self._submitted.pop()
        while not self.core.is_idle:
            self.core.step()

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise CheckpointError(f"encoding a text: {self.checkpoint.source} has no tokenizer. Give token ids.")
        return self.tokenizer

    def _encoded(self, prompt: str | Many[int]) -> tuple[int, ...]:
        return tuple(self._text().encode(prompt)) if isinstance(prompt, str) else as_token_ids(prompt)

    def chat_length(self, messages: Many[Message]) -> int:
        """How many tokens a conversation has, as the model gets it."""
        return len(self._rendered(messages))

    def _rendered(self, messages: Many[Message]) -> tuple[int, ...]:
        """Special tokens in messages are text: a prompt has them as they are."""
        template: ChatTemplate = self.checkpoint.chat_template()
        return tuple(ContentGuard(self._text()).encoded(lambda hide: template.render(hide(list(messages)))))

    def _generated(
        self, prompts: Many[tuple[int, ...]], params: Many[SamplingParams], *, continues: bool
    ) -> list[Completion]:
        with self._alone():
            readers = dict[Sequence, CompletionReader]()
            for prompt, one in zip(prompts, params, strict=True):
                readers |= self._submit([prompt], one, continues=continues)
            for _ in self._run(readers):
                pass
        return [reader.done for reader in readers.values()]

    def _streamed(self, prompt: tuple[int, ...], params: SamplingParams | None, *, continues: bool) -> Iterator[str]:
        with self._alone():
            readers = self._submit([prompt], *as_params(params, 1), continues=continues)
            for _, text in self._run(readers):
                if text:
                    yield text

    def _submit(
        self, prompts: Many[tuple[int, ...]], params: SamplingParams, *, continues: bool = True
    ) -> dict[Sequence, CompletionReader]:
        """With `continues` an output goes on where its prompt ended: a leading space belongs to it."""
        params = with_special_stops(params.resolved(self.sampling), self.tokenizer, self.executor.vocab)
        params = with_bad_words(params, self.tokenizer)
        readers = dict[Sequence, CompletionReader]()
        for prompt in prompts:
            sequences = self._added(prompt, params)
            for index, sequence in enumerate(sequences):
                readers[sequence] = reader = CompletionReader(sequences, index, self.tokenizer, continues=continues)
                reader.done.prompt_logprobs = sequences[0].prompt_logprobs  # the first is scored, for all of them
        return readers

    def _added(self, prompt: tuple[int, ...], params: SamplingParams, pooling: Pooling | None = None) -> list[Sequence]:
        """The sequences of a prompt, in the core."""
        name, arrival = f"request-{next(self._numbers)}", time.monotonic()
        request = Request(name, prompt, params, arrival=arrival, pooling=pooling)
        self._submitted.append(request.id)
        return self.core.add(request)

    def _run(self, readers: dict[Sequence, CompletionReader]) -> Generator[tuple[Sequence, str], None, None]:
        """Step until all are done; a caller that stops iterating cancels the rest."""
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
            self._give_up()
