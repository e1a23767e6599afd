"""GenerateCall: a call of `generate` that is under way, and what was decided for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_any, tree_map

from phonograph.hf.decode_recording import StepForm
from phonograph.hf.generation_cache import GenerationCache
from phonograph.hf.held_caches import HeldCache


@dataclass(eq=False)
class GenerateCall:
    """A call of `generate` that is under way in this thread."""

    declined: str | None
    is_decided: bool = False
    """Whether it was given a cache, or a reason why not."""
    entry: HeldCache | None = None
    static_len: int | None = None
    """Of the static cache that was asked for; None where transformers would have made one that grows."""
    last_form: StepForm | None = None
    """That of the step before; None before the first."""
    is_asked: bool = False
    """Whether the next lookup of a step's runner is this generation's."""
    has_step: bool = False
    """Whether the generation's loop runs its steps by way of here."""
    is_step: bool | None = None
    """Whether the model is called for a token of every sequence next, and not for a part of a prompt; None where the
    model prepares its inputs itself."""
    is_raw: bool = False
    """Whether the inputs of the step are yet to be prepared."""

    def handed_out(self, result: Any) -> Any:
        """A result with a cache of the caller's own: of the kind that transformers would have made."""
        if self.entry is None or not tree_any(_is_ours, result):
            return result
        cache, length = self.entry.cache, self.static_len
        theirs = cache.growing() if length is None else cache.static(length)
        return tree_map(lambda leaf: theirs if _is_ours(leaf) else leaf, result)


def _is_ours(leaf: Any) -> bool:
    return isinstance(leaf, GenerationCache)
