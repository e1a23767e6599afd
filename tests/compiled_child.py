"""A body compiled by inductor in a process of its own, which says what that took."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from phonograph import ShapeKey, Stage, graph_break
from phonograph.graphs.phases.context import Current, tracing
from phonograph.graphs.recording.backends.base import BodyView, SizedAxis
from phonograph.graphs.recording.backends.compilers import COMPILERS
from phonograph.graphs.recording.backends.pieces import program_of
from phonograph.graphs.recording.backends.traced import Tracer


@graph_break(fake=torch.empty_like)
def attend(q: torch.Tensor) -> torch.Tensor:
    return q * 0.5


WEIGHTS = [torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) / 4 for seed in range(3)]


def body(batch: Any, kwargs: Any) -> torch.Tensor:
    x = batch["x"]
    for weight in WEIGHTS:
        x = attend(torch.nn.functional.silu(x @ weight) + x.sum(-1, keepdim=True).tanh())
    return torch.tanh(x) * 2


def main() -> None:
    tracer = Tracer(body, lambda graph: program_of(graph, (), {}, COMPILERS["inductor"]))
    worst = 0.0
    for num in (8, 3, 1):
        x = torch.randn(num, 16, generator=torch.Generator().manual_seed(num))
        view = BodyView(ShapeKey("p", "seqs", num), {"x": x}, {}, [SizedAxis(x, 0, "seqs")])
        with tracing(Current(stage=Stage.COMPILING)):
            call = tracer.call(view)
        graph = call.program.graph
        assert not graph.misfit(call.flat)
        with torch.no_grad():
            (found,) = call.program.run(call.flat, graph.sizes(call.flat), checks=True)
        worst = max(worst, float((found - body({"x": x}, {})).abs().max()))
    counted = torch._dynamo.utils.counters
    print(
        json.dumps(
            {
                "misses": counted["inductor"]["fxgraph_cache_miss"] + counted["aot_autograd"]["autograd_cache_miss"],
                "hits": counted["inductor"]["fxgraph_cache_hit"] + counted["aot_autograd"]["autograd_cache_hit"],
                "num_pieces": len(tracer.program.pieces),
                "num_compiled": tracer.program.num_compiled,
                "worst": worst,
                "folder": os.environ["TORCHINDUCTOR_CACHE_DIR"],
            }
        )
    )


if __name__ == "__main__":
    main()
