"""accelerate: `model.generate` of a Hugging Face model with its decode steps as graphs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.devices import open_device
from phonograph.errors import DeclarationError, DeviceError
from phonograph.graphs.graphed import Graphed
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.numbers import is_whole

try:
    import transformers
except ImportError:
    raise DeviceError("phonograph.hf needs transformers. Run: pip install 'phonograph[hf]'") from None

from phonograph.hf.admission import PREPARE, prepares_as_usual, refusal
from phonograph.hf.decode_recording import DecodeRecording, StepForm, as_they_are, form_of
from phonograph.hf.generation_cache import CACHE, GenerationCache, shape_of

log = logging.getLogger("phonograph")

_PATCHED = (
    "generate", "_prepare_cache_for_generation", "prepare_inputs_for_generation", "_valid_auto_compile_criteria",
    "get_compiled_call",
)  # fmt: skip
"""Methods of a model that are replaced: those by which `generate` gets its cache, a step's inputs, and its runner."""
_SMALLEST_CACHE = 256
_FIRST = "the first step of a kind is taken to see whether the second is like it"
_COMPARED = "what is recorded is compared with a step that is not"


@dataclass(eq=False)
class _Entry:
    """A cache, and the recordings of steps over it."""

    cache: GenerationCache
    num_seqs: int
    recordings: dict[StepForm, DecodeRecording] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """Why there is no recording at all, where there could have been one."""
        refusals = [one.refusal for one in self.recordings.values()]
        return refusals[0] if refusals and None not in refusals else None


@dataclass(eq=False)
class _Call:
    """A call of `generate` that is under way."""

    thread: int
    declined: str | None = None
    is_decided: bool = False
    """Whether it was given a cache, or a reason why not."""
    entry: _Entry | None = None
    last_form: StepForm | None = None
    """That of the step before; None before the first."""
    is_asked: bool = False
    """Whether the next lookup of a step's runner is this generation's."""
    is_step: bool = False
    """Whether the model is called for a token of every sequence next; else for a part of a prompt."""
    is_raw: bool = False
    """Whether the inputs of the step are yet to be prepared."""


class Accelerated:
    """A model whose `generate` replays its decode steps. Made by `accelerate`; undone by `undo`, or at the end of a
    `with`.

    A generation gets a static cache that is kept for the next one of the same batch size and length. Its second decode
    step is recorded, and compared with the plain one; from then on steps of all generations over that cache are
    replays. What the recording took for granted is looked at when a generation begins, and checked at every step. What
    is not served runs as it did, and is counted with a reason.
    """

    def __init__(self, model: Any, max_len: int | None, max_caches: int) -> None:
        self.model = model
        self.max_len = max_len
        self.max_caches = max_caches
        self.generations = 0
        """Calls of `generate` that got a cache with recordings."""
        self.declined: Counter[str] = Counter()
        """By reason, calls of `generate` that ran as they did before."""
        self.eager_steps: Counter[str] = Counter()
        """By reason, decode steps without a recording; those that a recording ran eagerly are in its own counts."""
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._given_back: Counter[str] = Counter()
        """Steps of recordings that were released."""
        self._before: dict[str, Any] = {}
        self._prepares = False
        """Whether `prepare_inputs_for_generation` is replaced, so that inputs arrive unprepared."""
        self._pool: BufferPool | None = None
        """Input buffers and graph memory of all recordings."""
        self._call: _Call | None = None
        self._lock = threading.Lock()

    # -- saying what was done -----------------------------------------------------------------------------

    @property
    def replays(self) -> int:
        """Decode steps that were replays."""
        return self._given_back["replays"] + sum(run.stats.replays.total() for run in self._runs())

    def explain(self) -> str:
        """Generations with and without graphs, what is recorded, and the reason of each step that was eager."""
        eager = self._given_back["eager"] + sum(run.stats.eager.total() for run in self._runs())
        eager += self.eager_steps.total()
        lines = [
            f"{type(self.model).__name__}: {self.generations} generations with graphs, {self.declined.total()} without",
            *(f"  {count} without: {reason}" for reason, count in self.declined.most_common()),
            f"decode steps: {self.replays} replays, {eager} eager",
            *(f"  {count} eager: {reason}" for reason, count in self.eager_steps.most_common()),
        ]
        for entry in self._entries.values():
            lines.append(f"cache of {entry.num_seqs} × {entry.cache.max_len} tokens")
            for recording in entry.recordings.values():
                lines += [f"  {line}" for line in recording.explain().splitlines()]
        return "\n".join(lines)

    def _runs(self) -> list[Graphed]:
        recordings = (one for entry in self._entries.values() for one in entry.recordings.values())
        return [one.run for one in recordings if one.run is not None]

    # -- installing ---------------------------------------------------------------------------------------

    @property
    def is_installed(self) -> bool:
        return handle_of(self.model) is self

    def install(self) -> None:
        """Replace methods of this model; those of its class stay."""
        own = vars(self.model)
        self._before = {name: own[name] for name in _PATCHED if name in own}
        # One that prepares its inputs in a way of its own is asked: what it takes is in its signature.
        self._prepares = prepares_as_usual(self.model)
        for name in _PATCHED if self._prepares else [name for name in _PATCHED if name != PREPARE]:
            setattr(self.model, name, getattr(self, f"_{name.strip('_')}"))

    def undo(self) -> None:
        """Restore the model, and free caches and recordings."""
        if self.is_installed:
            for name in _PATCHED:
                vars(self.model).pop(name, None)
            vars(self.model).update(self._before)
        self._release_all()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __reduce__(self) -> Any:
        """A copy of the model is accelerated too, with caches and recordings of its own."""
        kept = {"_before": self._before, "_prepares": self._prepares}
        return Accelerated, (self.model, self.max_len, self.max_caches), kept

    def _release_all(self) -> None:
        while self._entries:
            self._give_back(next(iter(self._entries)))

    def _give_back(self, key: tuple[Any, ...]) -> None:
        """A cache and its recordings."""
        for recording in self._entries.pop(key).recordings.values():
            self._release(recording)

    def _release(self, recording: DecodeRecording) -> None:
        if recording.run is not None:
            stats = recording.run.stats
            self._given_back.update(replays=stats.replays.total(), eager=stats.eager.total())
            recording.run.release()

    def _plain(self, name: str) -> Callable[..., Any]:
        """A method of the model as it was."""
        found: Callable[..., Any] = self._before.get(name) or getattr(type(self.model), name).__get__(self.model)
        return found

    # -- what `generate` calls ----------------------------------------------------------------------------

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if not self._lock.acquire(blocking=False):
            return self._plain("generate")(*args, **kwargs)
        declined = "custom_generate has a loop of its own" if kwargs.get("custom_generate") is not None else None
        self._call = _Call(threading.get_ident(), declined)
        try:
            result = self._plain("generate")(*args, **kwargs)
            if isinstance(getattr(result, CACHE, None), GenerationCache):
                result.past_key_values = result.past_key_values.handed_out()
            return result
        finally:
            self._call = None
            self._lock.release()

    _generate.__wrapped__ = transformers.GenerationMixin.generate  # type: ignore[attr-defined]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_len: int
    ) -> Any:
        arguments = (generation_config, model_kwargs, generation_mode, batch_size, max_len)
        found = self._entry_for(*arguments)
        if isinstance(found, _Entry):
            self.generations += 1
            model_kwargs[CACHE] = found.cache
            return None
        _counted(self.declined, found)
        return self._plain("_prepare_cache_for_generation")(*arguments)

    def _prepare_inputs_for_generation(self, input_ids: torch.Tensor, **inputs: Any) -> dict[str, Any]:
        """The inputs of a step, as they are: a recording prepares them itself, masks and all."""
        call = self._call
        if call is not None and call.entry is not None and inputs.get(CACHE) is call.entry.cache:
            call.is_step = inputs.get("next_sequence_length") == 1 and not inputs.get("is_first_iteration")
            # Where the window is in a padded mask is computed on the host.
            is_masked = inputs.get("attention_mask") is not None
            call.is_raw = call.is_step and not (is_masked and any(call.entry.cache.is_sliding))
            if call.is_raw:
                return as_they_are(input_ids, inputs, call.entry.cache.max_len)
        prepared: dict[str, Any] = self._plain(PREPARE)(input_ids, **inputs)
        return prepared

    _prepare_inputs_for_generation.__wrapped__ = (  # type: ignore[attr-defined]
        transformers.GenerationMixin.prepare_inputs_for_generation
    )

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        call = self._call
        if call is not None and call.entry is not None and call.entry.cache is model_kwargs.get(CACHE):
            call.is_asked = True
            return True
        return bool(self._plain("_valid_auto_compile_criteria")(model_kwargs, generation_config))

    def _get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        call = self._call
        if call is not None and call.is_asked and call.thread == threading.get_ident():
            call.is_asked = False
            return self._step
        found: Callable[..., Any] = self._plain("get_compiled_call")(compile_config)
        return found

    # -- deciding -----------------------------------------------------------------------------------------

    def _entry_for(self, config: Any, inputs: Any, mode: Any, batch_size: int, max_len: int) -> _Entry | str:
        """The cache and recordings that a generation gets; or why it gets none."""
        call = self._call
        if call is None or call.thread != threading.get_ident() or call.is_decided:
            return "another generate of this model is under way"
        call.is_decided = True
        reason = call.declined or refusal(self.model, config, inputs, mode)
        if reason is not None:
            return reason
        needed = max(max_len, getattr(config, "max_cache_len", None) or 0)
        if self.max_len is not None and needed > self.max_len:
            return f"a cache for {needed:,} tokens is needed, max_len is {self.max_len:,}"
        entry = self._held(batch_size * max(1, config.num_return_sequences or 1), needed)
        if entry.refusal is not None:
            return f"no recording is possible: {entry.refusal}"
        entry.cache.reset()
        call.entry = entry
        return entry

    def _held(self, num_seqs: int, needed: int) -> _Entry:
        """A cache for so many sequences and tokens."""
        config, where = self.model.config.get_text_config(decoder=True), self.model.device
        limits = (self.max_len, getattr(config, "max_position_embeddings", None))
        length = min([max(_SMALLEST_CACHE, 1 << (needed - 1).bit_length()), *filter(None, limits)])
        length = max(length, needed)  # past its positions a model may still generate
        # What is made in inference mode can't be written outside of it.
        key = (self.model.dtype, where), num_seqs, torch.is_inference_mode_enabled(), shape_of(config, length)
        for other in [other for other in self._entries if other[0] != key[0]]:
            self._give_back(other)
        if self._pool is None or not self._entries:
            self._pool = BufferPool(open_device(where))
        entry = self._entries.pop(key, None)
        if entry is None:
            while len(self._entries) >= self.max_caches:
                self._give_back(next(iter(self._entries)))
            entry = _Entry(GenerationCache(config, length), num_seqs)
        self._entries[key] = entry  # least recently used first
        return entry

    # -- steps --------------------------------------------------------------------------------------------

    def _step(self, **inputs: Any) -> Any:
        """What `generate` runs for a step: a token of every sequence, or a part of a prompt."""
        call, pool = self._call, self._pool
        assert call is not None
        assert call.entry is not None
        assert pool is not None
        entry = call.entry
        forward = self._forward_raw() if call.is_raw else self.model
        told = self._prepares and self.is_installed
        is_step = call.is_step if told else inputs["input_ids"].shape[1] == 1
        call.is_step = call.is_raw = False
        is_ours = inputs.get(CACHE) is entry.cache
        if is_ours and not is_step:
            return forward(**inputs)
        found = form_of(inputs) if is_ours else "the model has replaced the cache"
        if isinstance(found, str):
            _counted(self.eager_steps, found)
            return forward(**inputs)
        form, tensors = found
        last, call.last_form = call.last_form, form
        recording = entry.recordings.get(form)
        reason = _why_eager(recording, last, form)
        if reason is not None:
            _counted(self.eager_steps, reason)
            return forward(**inputs)
        changed = recording.changed() if recording is not None and last is None else None
        if recording is not None and changed is None:
            return recording.step(tensors)
        if recording is not None:
            log.warning("accelerate: the decode step is recorded again: %s", changed)
            self._release(recording)
        entry.recordings[form] = recording = DecodeRecording(self.model, forward, entry.cache, form, pool)
        outputs = recording.record(tensors, inputs)
        refused = f"no recording is possible: {recording.refusal}" if recording.refusal is not None else None
        _counted(self.eager_steps, refused or _COMPARED)
        return outputs

    def _forward_raw(self) -> Callable[..., Any]:
        """Takes the inputs of a step that are yet to be prepared."""
        model, prepare = self.model, self._plain(PREPARE)

        def forward(**inputs: Any) -> Any:
            return model(**prepare(next_sequence_length=1, **inputs))

        return forward


def _why_eager(recording: DecodeRecording | None, last: StepForm | None, form: StepForm) -> str | None:
    """Why a step is neither served by a recording nor makes one."""
    if recording is not None:
        return f"no recording is possible: {recording.refusal}" if recording.refusal is not None else None
    if last is None:
        return _FIRST
    return f"inputs change their form: {last.changed_to(form)}" if last != form else None


def accelerate(model: Any, *, max_len: int | None = None, max_caches: int = 4) -> Accelerated:
    """Have `model.generate` replay its decode steps as graphs, over a static cache.

    Generations that need a longer cache than `max_len` run as they did; caches have the next power of two of tokens,
    at most that. `max_caches` of them are kept, one for each batch size and length, with their recordings. A model
    that is accelerated already gives the handle that it has.
    """
    if not isinstance(model, transformers.GenerationMixin) or not isinstance(model, torch.nn.Module):
        raise DeclarationError(
            f"accelerating a {type(model).__name__}: it is not a transformers model with generate(). Pass that model "
            "itself: get_base_model() of a PEFT model, _orig_mod of a compiled one; graphed() serves any other module."
        )
    for name, value in (("max_len", max_len), ("max_caches", max_caches)):
        if not is_whole(value, 1) and not (name == "max_len" and value is None):
            raise DeclarationError(f"accelerate({name}={value!r}): expected a whole number from 1 on. Correct it.")
    held = handle_of(model)
    if held is not None:
        if (held.max_len, held.max_caches) != (max_len, max_caches):
            raise DeclarationError(
                f"accelerating a {type(model).__name__} with max_len={max_len} and max_caches={max_caches}: it is "
                f"accelerated with {held.max_len} and {held.max_caches}. Call undo() of its handle first."
            )
        return held
    missing = [name for name in _PATCHED if not hasattr(model, name)]
    if missing:
        raise DeclarationError(
            f"accelerating a {type(model).__name__}: transformers {transformers.__version__} has no {missing[0]}, "
            "which generate calls in 5.17 to 5.22. Install one of these."
        )
    where: Any = model.device
    if open_device(where).name == "emulated":
        log.warning(
            "accelerate: the model is on the CPU, where graphs are emulated: right for development and tests, not "
            "fast. Move it to a GPU first."
        )
    handle = Accelerated(model, max_len, max_caches)
    handle.install()
    return handle


def handle_of(model: Any) -> Accelerated | None:
    """The handle of a model that is accelerated."""
    found = getattr(vars(model).get("generate"), "__self__", None)
    return found if isinstance(found, Accelerated) else None


def _counted(counts: Counter[str], reason: str) -> None:
    """Count why something is eager; the first time it is logged."""
    if reason not in counts:
        log.log(
            logging.INFO if reason in (_FIRST, _COMPARED) else logging.WARNING, "accelerate: eager steps: %s", reason
        )
    counts[reason] += 1
