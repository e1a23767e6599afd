"""accelerate: `model.generate` of a Hugging Face model with its decode steps as graphs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from phonograph.devices import open_device
from phonograph.errors import DeclarationError, DeviceError
from phonograph.numbers import is_whole

try:
    import transformers
except ImportError:
    raise DeviceError("phonograph.hf needs transformers. Run: pip install 'phonograph[hf]'") from None

from phonograph.hf.admission import PREPARE, otherwise_asked, prepares_as_usual, refusal
from phonograph.hf.decode_recording import DecodeRecording, StepForm, as_they_are, form_of
from phonograph.hf.generate_call import GenerateCall
from phonograph.hf.generation_cache import CACHE
from phonograph.hf.held_caches import HeldCache, HeldCaches
from phonograph.hf.replacement import CopiedState, Replacement, replacements_of

log = logging.getLogger("phonograph")

_PATCHED = (
    "generate", "_prepare_cache_for_generation", "prepare_inputs_for_generation", "_valid_auto_compile_criteria",
    "get_compiled_call", "__getstate__",
)  # fmt: skip
"""Methods of a model that are replaced: those by which `generate` gets its cache, a step's inputs, and its runner; and
the one by which the model is copied."""
_PREVIOUS = "_previous_max_cache_length"
_FIRST = "the first step of a kind is taken to see whether the second is like it"
_COMPARED = "what is recorded is compared with a step that is not"
_UNDER_WAY = "another generate of this model is under way"
_PAST = "generate was called past the model: as type(model).generate, or as generate.__wrapped__"
_SECOND = "one call of generate began two generations, and its cache serves the first"


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
        self._replayed_generations = 0
        """Those of them in which a step was a replay."""
        self.declined: Counter[str] = Counter()
        """By reason, calls of `generate` that ran as they did before."""
        self.eager_steps: Counter[str] = Counter()
        """By reason, decode steps without a recording; those that a recording ran eagerly are in its own counts."""
        self._caches = HeldCaches(model, max_len, max_caches)
        self._replacements: dict[str, Replacement] = {}
        self.holds = 1
        """Calls of `accelerate` that gave this handle and were not undone."""
        self._under_way = threading.local()
        self._lock = threading.Lock()
        """Held by the generation that has the caches."""

    # -- saying what was done -----------------------------------------------------------------------------

    @property
    def replays(self) -> int:
        """Decode steps that were replays."""
        return self._caches.replays

    def explain(self) -> str:
        """Generations with and without graphs, what is recorded, and the reason of each step that was eager."""
        eager = self._caches.eager_steps + self.eager_steps.total()
        unreplayed = self.generations - self._replayed_generations
        without = self.declined.total() + unreplayed
        lines = [
            f"{type(self.model).__name__}: {self._replayed_generations} generations with graphs, {without} without"
            f"{'' if self.is_installed else '; undone'}",
            *([f"  {unreplayed} without: none of their steps was a replay"] if unreplayed else []),
            *(f"  {count} without: {reason}" for reason, count in self.declined.most_common()),
            f"decode steps: {self.replays} replays, {eager} eager",
            *(f"  {count} eager: {reason}" for reason, count in self.eager_steps.most_common()),
        ]
        return "\n".join([*lines, *self._caches.explain()])

    # -- installing ---------------------------------------------------------------------------------------

    @property
    def is_installed(self) -> bool:
        """Whether `generate` of the model comes by way of here."""
        return any(one.is_installed for one in self._replacements.values())

    def install(self) -> None:
        """Replace methods of this model; those of its class stay."""
        # One that prepares its inputs in a way of its own is asked: what it takes is in its signature.
        names = _PATCHED if prepares_as_usual(self.model) else [name for name in _PATCHED if name != PREPARE]
        for name in names:
            self._replacements[name] = Replacement(self.model, name, getattr(self, f"_{name.strip('_')}"))
        for one in self._replacements.values():
            one.install()

    def undo(self) -> None:
        """Restore the model, and free caches and recordings.

        What others have put over `generate` since stays, and calls what was there before. A generation that is under
        way ends with plain steps, and then gives its cache back.
        """
        self.holds = 0
        for one in self._replacements.values():
            one.remove()
        self._release_unused()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *error: object) -> None:
        """Undo what the `accelerate` of this `with` did: nothing, where the model was accelerated already."""
        self.holds -= 1
        if self.holds <= 0:
            self.undo()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is accelerated too, with caches and recordings of its own."""
        names = ("model", "max_len", "max_caches", "holds", "_replacements")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Accelerated.__init__(self, state["model"], state["max_len"], state["max_caches"])
        vars(self).update(state)

    def _release_unused(self) -> None:
        """Give everything back once the handle is undone, unless a generation uses it, which then does that."""
        if not self.is_installed and self._lock.acquire(blocking=False):
            try:
                self._caches.release_all()
            finally:
                self._lock.release()

    def _plain(self, name: str) -> Callable[..., Any]:
        """A method of the model as it was."""
        return self._replacements[name].plain

    @property
    def _call(self) -> GenerateCall | None:
        """The call of `generate` that this thread is in."""
        return getattr(self._under_way, "call", None)

    # -- what `generate` calls ----------------------------------------------------------------------------

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        outer = self._call
        is_served = self._lock.acquire(blocking=False)
        replays = self.replays
        call = GenerateCall(otherwise_asked(self.model, args, kwargs) if is_served else _UNDER_WAY)
        self._under_way.call = call
        try:
            return call.handed_out(self._plain("generate")(*args, **kwargs))
        finally:
            self._under_way.call = outer
            if is_served:
                self._replayed_generations += self.replays > replays
                self._lock.release()
                self._release_unused()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_len: int
    ) -> Any:
        arguments = (generation_config, model_kwargs, generation_mode, batch_size, max_len)
        found = self._entry_for(*arguments)
        if isinstance(found, HeldCache):
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
            # Where the window is in a padded mask is computed on the host; and who wraps this method expects inputs
            # that are prepared.
            is_masked = inputs.get("attention_mask") is not None
            is_last = call.has_step and self._replacements[PREPARE].is_outermost
            call.is_raw = call.is_step and is_last and not (is_masked and any(call.entry.cache.is_sliding))
            if call.is_raw:
                return as_they_are(input_ids, inputs, call.entry.cache.max_len)
        prepared: dict[str, Any] = self._plain(PREPARE)(input_ids, **inputs)
        return prepared

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        call = self._call
        if call is not None and call.entry is not None and call.entry.cache is model_kwargs.get(CACHE):
            call.is_asked = True
            return True
        return bool(self._plain("_valid_auto_compile_criteria")(model_kwargs, generation_config))

    def _get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        call = self._call
        if call is not None and call.is_asked:
            call.is_asked, call.has_step = False, True
            return self._step
        found: Callable[..., Any] = self._plain("get_compiled_call")(compile_config)
        return found

    def _getstate(self) -> Any:
        """What a copy of the model gets."""
        state = self._plain("__getstate__")()
        return CopiedState(state, self.model) if type(state) is dict else state

    # -- deciding -----------------------------------------------------------------------------------------

    def _entry_for(self, config: Any, inputs: Any, mode: Any, batch_size: int, max_len: int) -> HeldCache | str:
        """The cache and recordings that a generation gets; or why it gets none."""
        call = self._call
        if call is None:
            return _UNDER_WAY if self._lock.locked() else _PAST
        if call.is_decided:
            return _SECOND
        call.is_decided = True
        reason = call.declined or refusal(self.model, config, inputs, mode)
        if reason is not None:
            return reason
        needed = max(max_len, getattr(config, "max_cache_len", None) or 0)
        if config.cache_implementation is not None:
            # transformers gives a static cache the length of the longest one before.
            needed = call.static_len = max(needed, getattr(self.model, _PREVIOUS, -1))
        if self.max_len is not None and needed > self.max_len:
            return f"a cache for {needed:,} tokens is needed, max_len is {self.max_len:,}"
        entry = self._caches.for_generation(batch_size * max(1, config.num_return_sequences or 1), needed)
        if entry.refusal is not None:
            return f"no recording is possible: {entry.refusal}"
        if call.static_len is not None:
            setattr(self.model, _PREVIOUS, call.static_len)
        entry.cache.reset()
        call.entry = entry
        return entry

    # -- steps --------------------------------------------------------------------------------------------

    def _step(self, **inputs: Any) -> Any:
        """What `generate` runs for a step: a token of every sequence, or a part of a prompt."""
        call = self._call
        assert call is not None
        assert call.entry is not None
        entry = call.entry
        forward = self._forward_raw() if call.is_raw else self.model
        told, call.is_step, call.is_raw = call.is_step, None, False
        is_step = told if told is not None else _is_one_token(inputs)
        is_ours = inputs.get(CACHE) is entry.cache
        if is_ours and not is_step:
            return forward(**inputs)
        found = form_of(inputs) if is_ours else "the model has replaced the cache"
        if not self.is_installed:
            found = "the handle was undone within the generation"
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
            self._caches.release(recording)
        entry.recordings[form] = recording = DecodeRecording(self.model, forward, entry.cache, form, entry.pool)
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


def _is_one_token(inputs: Mapping[str, Any]) -> bool:
    """Whether a model that prepares its inputs itself is called for a token of every sequence."""
    ids = inputs.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.shape[1] == 1


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
        held.holds += 1
        return held
    missing = [name for name in _PATCHED if not hasattr(model, name)]
    if missing:
        raise DeclarationError(
            f"accelerating a {type(model).__name__}: transformers {transformers.__version__} has no {missing[0]}, "
            "which generate calls in 5.17 to 5.23. Install one of these."
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
    handles = (getattr(one.serve, "__self__", None) for one in replacements_of(model, _PATCHED))
    return next((one for one in handles if isinstance(one, Accelerated)), None)


def _counted(counts: Counter[str], reason: str) -> None:
    """Count why something is eager; the first time it is logged."""
    if reason not in counts:
        log.log(
            logging.INFO if reason in (_FIRST, _COMPARED) else logging.WARNING, "accelerate: eager steps: %s", reason
        )
    counts[reason] += 1
