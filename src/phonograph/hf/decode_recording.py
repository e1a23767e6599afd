"""Decode recording: one step of `generate` over one cache as a graph, for inputs of one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import utils as generation

from phonograph.graphs.graphed import Graphed, graphed
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.inputs.tree import leaves
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.phases.phase import SampleFunction
from phonograph.graphs.progress import silent
from phonograph.graphs.recording.tensor_state import SavedState, generators_restored
from phonograph.graphs.trust.comparison import mismatch
from phonograph.hf.generation_cache import CACHE, GenerationCache

Saves = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of what it held."""
_MAX_STATE_BYTES = 1 << 28
"""Of tensors besides the cache that a step writes; of the cache, what a trial must put back is always saved."""
_PROMPT_ONLY: Sequence[str] = getattr(generation, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
"""Images and the like: what transformers drops when it prepares a decode step."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StepForm:
    """The keyword arguments of a step: tensors by their shape, and plain values."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """By slot: `attention_mask__full_attention` is an entry of a dict of masks."""
    constants: tuple[tuple[str, Any], ...]

    @property
    def slots(self) -> list[Slot]:
        return [
            Slot(name, ("seqs", *shape[1:]) if name == "input_ids" else shape, dtype, pad=Pad.fill(0))
            for name, shape, dtype in self.tensors
        ]

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The keyword arguments again, of tensors by slot."""
        found: dict[str, Any] = dict(self.constants)
        for name, tensor in tensors.items():
            outer, nested, inner = name.partition("__")
            if nested:
                found.setdefault(outer, {})[inner] = tensor
            else:
                found[name] = tensor
        return found

    def changed_to(self, form: StepForm) -> str:
        """What is otherwise in another form."""
        then, now = ({name: shape for name, shape, _ in one.tensors} for one in (self, form))
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return ", ".join(f"{name} {then.get(name)} → {now.get(name)}" for name in names) or "values that are no tensors"


def as_they_are(input_ids: torch.Tensor, inputs: Mapping[str, Any], max_len: int) -> dict[str, Any]:
    """The inputs of a step that is yet to be prepared, of one size throughout a generation."""
    dropped = {"next_sequence_length", "is_first_iteration", *(_PROMPT_ONLY if inputs.get("use_cache", True) else ())}
    given = {name: value for name, value in inputs.items() if name not in dropped}
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None:
        given["attention_mask"] = torch.nn.functional.pad(mask, (0, max_len - mask.shape[1]))
    if positions is not None:
        given["position_ids"] = positions[..., -1:]
    return {"input_ids": input_ids[:, -1:], **given}


def form_of(inputs: Mapping[str, Any]) -> tuple[StepForm, dict[str, torch.Tensor]] | str:
    """The form of a step and its tensors by slot; or why no recording takes it."""
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in inputs.items():
        if name == CACHE:
            continue
        entries = {f"{name}__{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        for key, one in entries.items():
            if isinstance(one, torch.Tensor):
                tensors[key] = one
            elif isinstance(one, _PLAIN) and not isinstance(value, dict):
                constants[key] = one
            else:
                return f"the model is passed {key}, a {type(one).__name__}, which no slot takes"
    form = StepForm(
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()),
        tuple(constants.items()),
    )
    return form, tensors


class DecodeRecording:
    """A step of one model over one cache, for inputs of one form."""

    def __init__(
        self, model: Any, forward: Callable[..., Any], cache: GenerationCache, form: StepForm, pool: BufferPool
    ) -> None:
        self._model, self._forward, self._cache, self._form = model, forward, cache, form
        self._pool = pool
        self._outputs: Any = None
        self.run: Graphed | None = None
        self.refusal: str | None = None
        """Why there is no recording."""

    def record(self, tensors: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        """Take a step plainly, record it, and compare: there is a recording if it gives what the plain step gave.

        The plain step is the one that counts; the recording is tried on the state before it, and leaves no trace.
        """
        device, written, held = self._pool.device, SavedState(_MAX_STATE_BYTES), self._cache.state()
        after: list[tuple[torch.Tensor, torch.Tensor]] = []
        with ExitStack() as plainly:
            with generators_restored(device):
                with written.watching():
                    plain = self._forward(**arguments)
                plainly.enter_context(generators_restored(device))
            self._outputs = type(plain)
            attributes = [(layer, dict(vars(layer))) for layer in self._cache.layers]

            def undo() -> None:
                written.restore()
                _put_back(held)

            try:
                after += [(tensor, tensor.clone()) for tensor in (*written.elements, *(tensor for tensor, _ in held))]
                self.refusal = self._tried(tensors, plain, after, undo)
            except Exception as error:  # the step has been taken: what goes wrong after it is no harm to its caller
                self.refusal = f"{type(error).__name__}: {error}"
                if self.run is not None:
                    self.run.release()
            finally:
                _put_back(after)
                for layer, values in attributes:
                    vars(layer).update(values)
        return plain

    def _tried(
        self, tensors: Mapping[str, torch.Tensor], plain: Any, after: Saves, undo: Callable[[], None]
    ) -> str | None:
        """Why the recording that is made is none to use, or None."""
        undo()
        self.run = self._recorded(tensors)
        runner = self.run.runner
        assert runner.report is not None
        if runner.report.failures:
            refusal: str | None = str(runner.report.failures[0].error)
        else:
            undo()
            refusal = self._difference(self.step(tensors), plain, after)
            runner.stats.clear()
        if refusal is not None:
            self.run.release()
        return refusal

    def changed(self) -> str | None:
        """What the recording took for granted and has changed since, by a look at everything; None if nothing has."""
        fact = self.run.runner.stale.find() if self.run is not None else None
        return fact.change if fact is not None else None

    def explain(self) -> str:
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        return self.run.runner.explain() if self.run is not None else "not recorded"

    def step(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Take a step; eagerly where the recording does not fit, which is counted."""
        assert self.run is not None
        return self._outputs(**self.run(**tensors), past_key_values=self._cache)

    def _recorded(self, tensors: Mapping[str, torch.Tensor]) -> Graphed:
        model, forward, cache, form = self._model, self._forward, self._cache, self._form

        def decode(**tensors: torch.Tensor) -> dict[str, Any]:
            outputs = forward(**form.arguments(tensors), past_key_values=cache)
            return {name: value for name, value in outputs.items() if name != CACHE}

        num_seqs = len(tensors["input_ids"])
        run = graphed(
            decode,
            slots=form.slots,
            bucketed="seqs",
            buckets=Buckets.of(num_seqs, exact=True),
            device=self._pool.device,
            pool=self._pool,
            sample=_like(tensors, int(model.config.get_text_config(decoder=True).vocab_size)),
        )
        run.capture(silent)
        return run

    @staticmethod
    def _difference(served: Any, plain: Any, after: Saves) -> str | None:
        """What the recording gives otherwise than the plain step, in outputs and in the cache."""
        wanted = {name: value for name, value in plain.items() if name != CACHE}
        pairs = [(f"output {path}", leaf, dict(leaves(dict(served.items())))[path]) for path, leaf in leaves(wanted)]
        pairs += [(f"tensor {number} that it writes", copy, tensor) for number, (tensor, copy) in enumerate(after)]
        for name, leaf, found in pairs:
            wrong = mismatch(found, leaf, tolerance=None)
            if wrong:
                return f"on its first batch the recording gives not what the model gives: {name} {wrong}"
        return None


def _put_back(saves: Saves) -> None:
    with torch.no_grad():
        for tensor, copy in saves:
            tensor.copy_(copy)


def _like(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> SampleFunction:
    """Samples: a real batch with other tokens."""
    template = {name: tensor.clone() for name, tensor in tensors.items()}

    def sample(extent: Extent, seed: int) -> dict[str, torch.Tensor]:
        ids = template["input_ids"]
        drawn = torch.randint(vocab_size, ids.shape, generator=torch.Generator().manual_seed(seed), dtype=ids.dtype)
        return template | {"input_ids": drawn.to(ids.device)}

    return sample
