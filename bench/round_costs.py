"""Round costs: device time of what a round adds to the target's pass, each part as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phonograph.bench.floors import graph_of
from phonograph.bench.timing import device_seconds
from phonograph.engine.llm import LLM
from phonograph.engine.models.decoder import LayerWeights
from phonograph.engine.models.draft_head import DraftWeights
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.drafting import Accepted, ReadsTarget

BANDWIDTH = 4.6e12
"""Bytes a second that an H200 reads."""
LAUNCHES = 1e-4
"""Seconds that the parts may take besides."""
CONTEXT = 256


def round_costs(llm: LLM, num_rows: int) -> dict[str, Any]:
    """Milliseconds of acceptance, features, extend (what plain steps do for the drafter) and draft (with extend), each
    with a launch of its graph, and of what a round adds in all, in one graph, against its goal: 1.3 times its bytes at
    full bandwidth, and 0.1 ms. Acceptance is the real one, also where an engine accepts at a set rate.

    Rows have pages of nobody, so that all of them read and write the null page: weights are what counts here.
    """
    parts, drafting, device = llm.executor.parts, llm.drafting, llm.device
    assert drafting is not None
    drafter, depth, on = drafting.make(parts), drafting.depth, device.torch_device
    width, start = depth + 1, min(CONTEXT, parts.limits.max_len // 2)
    rows = torch.arange(1, num_rows + 1, device=on)
    starts, counts = torch.full_like(rows, start), torch.full_like(rows, width)
    tokens = torch.ones((num_rows, width), dtype=torch.int64, device=on)
    taps: tuple[torch.Tensor, ...] = ()
    if isinstance(drafter, ReadsTarget):
        size = (num_rows * width, llm.executor.model.config.hidden)
        taps = tuple(torch.randn(size, device=on).to(parts.model.dtype) for _ in drafter.taps)
    features = drafter.features(taps) if isinstance(drafter, ReadsTarget) else None
    accepted = Accepted(rows, starts, tokens, counts, torch.zeros_like(parts.tables.pages), features)
    positions = (starts[:, None] + torch.arange(width, device=on)).flatten()
    queries = Queries(rows.repeat_interleave(width), positions, accepted.table, tokens_per_row=width)
    bounds = (
        torch.full_like(parts.tables["depth"], depth),
        torch.full_like(parts.tables["limit"], parts.limits.max_len),
    )
    drafts = parts.tables["draft"].clone().view(-1, depth)
    state = parts.tables.last_token.clone(), parts.tables.length.clone()

    rounds = parts.model.kernels.rounds
    accept = getattr(rounds, "inner", rounds).accept

    def acceptance() -> None:
        accept(queries, tokens.flatten(), tokens, bounds, *state, drafts)

    def adds() -> None:
        acceptance()
        if isinstance(drafter, ReadsTarget):
            drafter.features(taps)
        drafter.draft(accepted, depth)

    bodies: dict[str, Callable[[], object]] = {"round_adds": adds, "acceptance": acceptance}
    if isinstance(drafter, ReadsTarget):
        bodies["features"] = lambda: drafter.features(taps)
    bodies |= {"extend": lambda: drafter.keep_up(accepted), "draft": lambda: drafter.draft(accepted, depth)}
    seconds = {name: device_seconds(device, graph_of(device, _run(body)).replay) for name, body in bodies.items()}
    match drafting.weights:
        case (DraftWeights() as head, tuple() as layers):
            read = _bytes(head, layers, depth)
        case _:
            read = num_rows * start * 4
    goal = 1.3 * read / BANDWIDTH + LAUNCHES
    return {
        **{f"{name}_ms": round(time * 1e3, 4) for name, time in seconds.items()},
        "bytes": read,
        "goal_ms": round(goal * 1e3, 4),
    }


def _run(body: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        body()

    return run


def _bytes(head: DraftWeights, layers: Sequence[LayerWeights], depth: int) -> int:
    """What a head reads in a round: features and keys of the round, then a step a draft."""
    each = [one for layer in layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return head.fc.nbytes + depth * (head.head.nbytes + sum(one.nbytes for one in each))
