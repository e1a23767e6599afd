"""Layer check: every layer by itself, given what it was given with the model's own eager attention.

In half precision, a rounding in the first layer may grow from layer to layer, and send tokens to other experts, until
logits are far apart though every op is right. A layer that begins with the same bits has only its own roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from phonograph.hf.adapter.model import HfModel

LAYER_MOST = {torch.float16: 0.0025, torch.bfloat16: 0.02}
"""Of a token: the root mean square of the difference over that of what is compared."""
_ATTENDED = 0.8
"""The share of each prompt's tokens, and of decoded ones, for which every layer's attention must agree."""
_ADDED = 0.5
"""The share for which the rest of a layer must. No token sees another there; and one in ten may get another expert."""

_TINY = 1e-12


@dataclass(frozen=True)
class LayerCheck:
    """What was found of layers that were given the same."""

    attended: torch.Tensor  # [num_layers, num_tokens], of what attention gives
    added: (
        torch.Tensor
    )  # [num_layers + 1, num_tokens], of what embeddings, layers, and the last of them with the head give
    lengths: tuple[int, ...]
    """Of prompts; the tokens after them were decoded."""
    most: float

    def fault(self) -> str | None:
        """What differs by more than rounding, or None."""
        for layer, attended in enumerate(self.attended):
            if not self._agrees(self.added[layer], _ADDED):
                what = f"what layer {layer - 1} adds" if layer else "what its embeddings give"
                return f"{what} differs by {self._bad(self.added[layer]):.2g}"
            if not self._agrees(attended, _ATTENDED):
                return f"attention of layer {layer} differs by {self._bad(attended):.2g}"
        if not self._agrees(self.added[-1], _ADDED):
            return f"what its last layer and its head give differs by {self._bad(self.added[-1]):.2g}"
        return None

    @property
    def worst(self) -> float:
        """Of attention's differences."""
        return self.attended.max().item()

    def _agrees(self, apart: torch.Tensor, share: float) -> bool:
        parts = torch.split(apart, [*self.lengths, len(apart) - sum(self.lengths)])
        return all(int((one <= self.most).sum()) >= share * len(one) for one in parts)  # NaN is not below

    def _bad(self, apart: torch.Tensor) -> float:
        return apart[~(apart <= self.most)].median().item()

    def __str__(self) -> str:
        return f"given the same, attention of each layer differs by at most {self.worst:.1e} of its size"


def layer_check(
    model: HfModel,
    lengths: Sequence[int],
    num_steps: int,
    eager: Callable[[], torch.Tensor],
    paged: Callable[[], torch.Tensor],
) -> LayerCheck | None:
    """By two runs of the same tokens, which give logits; None for a model whose layers are not of the usual kind.

    `eager` runs each sequence by itself: its prompt, then so many steps. `paged` runs all prompts, then a step of all.
    """
    places = _places(model)
    if places is None:
        return None
    with _followed(model.decoder, places, _Record(len(places))) as own:
        wanted = eager()
    if not own.is_usual(len(lengths) * (1 + num_steps)):
        return None
    own = own.side_by_side(len(lengths))
    with _followed(model.layers, places, _Record(len(places), own.given)) as ours:
        logits = paged()
    given, arrived, mixed, ours_mixed = map(_joined, (own.given, ours.given, own.mixed, ours.mixed))
    most, eps = LAYER_MOST[model.dtype], torch.finfo(model.dtype).eps
    news = torch.cat([given[:1], given[1:] - given[:-1]])
    # A sum is rounded by its own size, however little was added.
    added = _size(arrived - given) / (_size(news) + _size(given) * eps / most).clamp_min(_TINY)
    last = _size(logits - wanted) / wanted.std(-1).clamp_min(_TINY)
    attended = _size(ours_mixed - mixed) / _size(mixed).clamp_min(_TINY)
    return LayerCheck(attended, torch.cat([added, last[None]]), tuple(lengths), most)


def _joined(calls: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """[num_layers, num_tokens, width]"""
    return torch.stack([torch.cat(list(layer), dim=1)[0] for layer in calls]).float()


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean(-1).sqrt()


def _places(model: HfModel) -> list[tuple[str, str]] | None:
    """The paths of layers, and of the attention within each."""
    count = len(model.outline.layers)
    for name, stack in model.decoder.named_modules():
        if isinstance(stack, torch.nn.ModuleList) and len(stack) == count:
            found = [
                [path for path, one in layer.named_modules() if path and hasattr(one, "layer_idx")] for layer in stack
            ]
            if all(len(paths) == 1 for paths in found):
                return [(f"{name}.{at}", f"{name}.{at}.{paths[0]}") for at, paths in enumerate(found)]
    return None


class _Record:
    """What layers are given, and what their attention gives, call by call."""

    def __init__(self, count: int, forced: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        self.given: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.mixed: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._forced = forced
        """By layer and call, what is given in the place of what arrives."""

    def arrives(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        self.given[layer].append(states.clone())
        if self._forced is None:
            return None
        states = self._forced[layer][len(self.given[layer]) - 1]
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def attended(self, layer: int, module: Any, args: Any, result: Any) -> None:
        self.mixed[layer].append((result[0] if isinstance(result, tuple) else result).clone())

    def is_usual(self, num_calls: int) -> bool:
        """Whether there were so many calls, each of one sequence of tokens."""
        calls = [*self.given, *self.mixed]
        return {len(one) for one in calls} == {num_calls} and all(
            one.dim() == 3 and one.shape[0] == 1 for layer in calls for one in layer
        )

    def side_by_side(self, num_seqs: int) -> _Record:
        """Calls of all sequences as one call each."""
        found = _Record(len(self.given))
        found.given, found.mixed = (
            [
                [torch.cat(layer[at :: len(layer) // num_seqs], dim=1) for at in range(len(layer) // num_seqs)]
                for layer in kind
            ]
            for kind in (self.given, self.mixed)
        )
        return found


@contextmanager
def _followed(layers: Any, places: Sequence[tuple[str, str]], record: _Record) -> Iterator[_Record]:
    hooks = []
    try:
        for at, (layer, attention) in enumerate(places):
            before = partial(record.arrives, at)
            hooks.append(layers.get_submodule(layer).register_forward_pre_hook(before, with_kwargs=True))
            after = partial(record.attended, at)
            hooks.append(layers.get_submodule(attention).register_forward_hook(after))
        yield record
    finally:
        for hook in hooks:
            hook.remove()
