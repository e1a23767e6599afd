"""Generation cache: a static cache whose decode step runs the same ops at every length, so that a graph can hold it.

It holds what transformers' own static cache holds, in tensors of the same shapes: outputs are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from phonograph.graphs.phases.context import Stage, current

CACHE = "past_key_values"
"""What a cache is called among the arguments of models."""


class WindowLayer(StaticSlidingWindowLayer):  # type: ignore[misc]
    """A sliding window that counts its tokens on the device.

    transformers' own counts them in Python and branches on the count. Here one formula serves a window that fills and
    one that is full: keys move left by one place, or by none, and the new one is written after them.
    """

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[-2] > 1:
            return self._extend(key_states, value_states)
        last = self.max_cache_len - 1
        is_full = self.cumulative_length > last
        kept = (torch.arange(self.max_cache_len, device=self.device) + is_full).clamp(max=last)
        place = self.cumulative_length.clamp(max=last).view(1)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.copy_(held.index_select(2, kept))
            held.index_copy_(2, place, new)
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def _extend(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Any:
        """Several tokens: a prompt, or a part of one."""
        length, count, window = int(self.cumulative_length), key_states.shape[-2], self.max_cache_len
        self.cumulative_length.add_(count)
        if length + count <= window:
            self.keys[:, :, length : length + count] = key_states
            self.values[:, :, length : length + count] = value_states
            return self.keys, self.values
        # The first new token sees one token less than the window holds: itself takes a place.
        seen = slice(1, window) if length >= window else slice(0, length)
        keys = torch.cat((self.keys[:, :, seen], key_states), dim=-2)
        values = torch.cat((self.values[:, :, seen], value_states), dim=-2)
        self.keys.copy_(keys[:, :, -window:])
        self.values.copy_(values[:, :, -window:])
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[Any, Any]:
        window = self.max_cache_len
        if query_length == 1 and current().stage is not Stage.EAGER:
            return window, (self.cumulative_length - window + 1).clamp(min=0)
        length = int(self.cumulative_length)
        full = window + query_length - 1 if length >= window else max(window, length + query_length)
        return full, max(length - window + 1, 0)

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0


class GenerationCache(StaticCache):  # type: ignore[misc]
    """A static cache that generations use one after the other."""

    def __init__(self, config: Any, max_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_len)
        self.max_len = max_len
        self._config = config
        self.layers: list[Any] = [_recordable(layer) for layer in self.layers]

    def state(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors that a step changes, each with a copy; keys of a layer without a window are written where the next
        step writes, and need none."""
        windows = [layer for layer in self.layers if isinstance(layer, WindowLayer)]
        tensors = [layer.cumulative_length for layer in self.layers]
        tensors += [tensor for layer in windows for tensor in (layer.keys, layer.values)]
        return [(tensor, tensor.clone()) for tensor in tensors]

    def growing(self) -> DynamicCache:
        """A copy as transformers would have made the cache itself: one that grows."""
        copied = DynamicCache(config=self._config)
        for layer, ours in zip(copied.layers, self.layers, strict=True):
            if not ours.is_initialized:
                continue
            length = int(ours.cumulative_length)
            layer.update(ours.keys[:, :, :length], ours.values[:, :, :length])
            if isinstance(ours, WindowLayer):
                layer.cumulative_length = length  # of which the window holds the last ones
        return copied

    def static(self, max_len: int) -> StaticCache:
        """A copy as transformers makes a static cache for so many tokens."""
        copied = StaticCache(config=self._config, max_cache_len=max_len)
        for layer, ours in zip(copied.layers, self.layers, strict=True):
            if not ours.is_initialized:
                continue
            size = layer.max_cache_len
            layer.lazy_initialization(ours.keys, ours.values)
            layer.keys.copy_(ours.keys[:, :, :size])
            layer.values.copy_(ours.values[:, :, :size])
            layer.cumulative_length.copy_(ours.cumulative_length)
            if isinstance(ours, WindowLayer):
                layer.cumulative_length_int = int(ours.cumulative_length)
        return copied


def unsupported_layer(config: Any) -> str | None:
    """The kind of a layer that no generation cache holds, or None."""
    layers = StaticCache(config=config, max_cache_len=1).layers
    kinds = {type(layer) for layer in layers} - {StaticLayer, StaticSlidingWindowLayer}
    if kinds:
        return f"cache layers of kind {min(kind.__name__ for kind in kinds)}"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "chunked attention"
    return None


def shape_of(config: Any, max_len: int) -> tuple[Any, ...]:
    """What the cache of a config looks like: two configs with the same shape may use one cache."""
    return tuple(
        (type(layer), layer.max_cache_len) for layer in StaticCache(config=config, max_cache_len=max_len).layers
    )


def _recordable(layer: Any) -> Any:
    if isinstance(layer, StaticSlidingWindowLayer):
        return WindowLayer(max_cache_len=layer.max_cache_len, sliding_window=layer.max_cache_len)
    return layer
