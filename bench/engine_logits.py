"""The logits of the engine's model for a whole sequence, which generation never shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.llm import LLM
from phonograph.engine.ops.queries import Queries, Span


def sequence_logits(
    llm: LLM, tokens: Sequence[int], *, as_decodes: bool = False, step: int | None = None
) -> torch.Tensor:
    """Logits after every token, [num_tokens, vocab]; `as_decodes` takes the attention of decode steps.

    All tokens are one step, or steps of that many: kernels may depend on their number.
    The pages are its own: those of the engine may hold prefixes that later requests share.
    """
    model, on = llm.executor.model, llm.device.torch_device
    count, size = len(tokens), llm.limits.page_size
    num_pages = -(-count // size)
    cache = CacheGroup.empty(model.keeps, num_pages + 1, size, dtype=model.dtype, device=on)
    ids = torch.tensor(tokens, device=on)
    table = torch.arange(1, num_pages + 1, device=on, dtype=torch.int32).repeat(2, 1)
    positions = torch.arange(count, device=on)
    found = []
    with torch.inference_mode():
        for part, at in zip(ids.split(step or count), positions.split(step or count), strict=True):
            spans = None if as_decodes else (Span(1, 0, int(at[0]), len(at)),)
            queries = Queries(torch.ones_like(part), at, table, as_decodes, spans)
            found.append(model.logits(model.hidden(part, queries, cache).states))
        return torch.cat(found)
