"""Held caches: those that generations of a model use one after the other, with the recordings of steps over them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.devices import open_device
from phonograph.graphs.graphed import Graphed
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.hf.decode_recording import DecodeRecording, StepForm
from phonograph.hf.generation_cache import GenerationCache, shape_of

_SMALLEST = 256


@dataclass(eq=False)
class HeldCache:
    """A cache, and the recordings of steps over it."""

    cache: GenerationCache
    num_seqs: int
    pool: BufferPool
    """Input buffers and graph memory of all recordings of the model."""
    recordings: dict[StepForm, DecodeRecording] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """Why there is no recording at all, where there could have been one."""
        refusals = [one.refusal for one in self.recordings.values()]
        return refusals[0] if refusals and None not in refusals else None


class HeldCaches:
    """At most `max_caches` caches of one model, of at most `max_len` tokens each."""

    def __init__(self, model: Any, max_len: int | None, max_caches: int) -> None:
        self._model, self._max_len, self._max_caches = model, max_len, max_caches
        self._held: dict[tuple[Any, ...], HeldCache] = {}
        self._given_back: Counter[str] = Counter()
        """Steps of recordings that were released."""
        self._pool: BufferPool | None = None

    @property
    def replays(self) -> int:
        return self._given_back["replays"] + sum(run.stats.num_replays for run in self._runs())

    @property
    def eager_steps(self) -> int:
        """Steps that recordings ran eagerly."""
        return self._given_back["eager"] + sum(run.stats.eager.total() for run in self._runs())

    def explain(self) -> list[str]:
        lines = []
        for held in list(self._held.values()):
            lines.append(f"cache of {held.num_seqs} × {held.cache.max_len} tokens")
            for recording in list(held.recordings.values()):
                lines += [f"  {line}" for line in recording.explain().splitlines()]
        return lines

    def for_generation(self, num_seqs: int, needed: int) -> HeldCache:
        """A cache for so many sequences and tokens: the one that is held, or a new one."""
        config, where = self._model.config.get_text_config(decoder=True), self._model.device
        limits = (self._max_len, getattr(config, "max_position_embeddings", None))
        length = min([max(_SMALLEST, 1 << (needed - 1).bit_length()), *filter(None, limits)])
        length = max(length, needed)  # past its positions a model may still generate
        # What is made in inference mode can't be written outside of it.
        key = (self._model.dtype, where), num_seqs, torch.is_inference_mode_enabled(), shape_of(config, length)
        for other in [other for other in self._held if other[0] != key[0]]:
            self._give_back(other)
        if self._pool is None or not self._held:
            self._pool = BufferPool(open_device(where))
        held = self._held.pop(key, None)
        if held is None:
            while len(self._held) >= self._max_caches:
                self._give_back(next(iter(self._held)))
            held = HeldCache(GenerationCache(config, length), num_seqs, self._pool)
        self._held[key] = held  # least recently used first
        return held

    def release_all(self) -> None:
        while self._held:
            self._give_back(next(iter(self._held)))

    def release(self, recording: DecodeRecording) -> None:
        if recording.run is not None:
            stats = recording.run.stats
            self._given_back.update(replays=stats.num_replays, eager=stats.eager.total())
            recording.run.release()

    def _give_back(self, key: tuple[Any, ...]) -> None:
        """A cache and its recordings."""
        for recording in self._held.pop(key).recordings.values():
            self.release(recording)

    def _runs(self) -> list[Graphed]:
        recordings = (one for held in list(self._held.values()) for one in list(held.recordings.values()))
        return [one.run for one in recordings if one.run is not None]
