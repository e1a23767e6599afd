"""HfModel: a model of transformers as a model of the engine. Its layers are its own; attention and pages are ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from phonograph.engine.cache.groups import CacheGroup, Paged
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Hidden
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.kernels import Kernels
from phonograph.engine.ops.layers.reference import TracedKernels, slots_of
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Attention, Queries
from phonograph.engine.state.column import Column
from phonograph.errors import DeclarationError
from phonograph.hf.adapter.attention import PagedStep, StepPlace, run
from phonograph.hf.adapter.head import logits_of
from phonograph.hf.adapter.outline import Outline


@dataclass(frozen=True)
class HfModel:
    """The protocol `Model` over modules of transformers."""

    config: ModelConfig
    outline: Outline
    whole: Any
    """The causal language model, with its attention set to ours."""
    decoder: Any
    """Its layers: from tokens and positions to hidden states."""
    head: Any
    """Its way from hidden states to logits."""
    attention: Attention
    kernels: Kernels
    """What writes the request tables. Layers are transformers' own."""
    dtype: torch.dtype
    max_len: int
    place: StepPlace | None = None
    """Where layers find the step, if the model hands no keyword arguments down to them."""
    fused: Any = None
    """A twin of the layers, whose norms and rotations are one launch each; None where nothing is fused."""
    notes: tuple[str, ...] = ()
    """What start-up found."""

    @cached_property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return tuple(one.detach() for one in self.whole.parameters())

    @property
    def keeps(self) -> tuple[Paged, ...]:
        return tuple(layer.kept for layer in self.outline.layers)

    @property
    def columns(self) -> tuple[Column, ...]:
        return ()

    @cached_property
    def matrices(self) -> list[Matrix]:
        """Those of plain projections; experts' are not among them."""
        inner = [one for one in self.decoder.modules() if isinstance(one, torch.nn.Linear)]
        output = self.whole.get_output_embeddings()
        return [Matrix(one.weight.detach()) for one in (*inner, output) if one is not None]

    @property
    def layers(self) -> Any:
        """Those that a pass runs. A compiler fuses torch's ops by itself, and does not look into a launch."""
        is_own = self.fused is None or isinstance(self.kernels, TracedKernels)
        return self.decoder if is_own else self.fused

    def with_attention(self, attention: Attention) -> Self:
        return replace(self, attention=attention)

    def with_kernels(self, kernels: Kernels) -> Self:
        return replace(self, kernels=kernels)

    def hidden(
        self,
        inputs: torch.Tensor,
        queries: Queries,
        cache: CacheGroup,
        wanted: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        if taps:
            raise DeclarationError(
                f"{self.config.architecture} runs through transformers, which gives no hidden states of single layers. "
                "Use a native model where layers are tapped."
            )
        states = self.states(inputs, queries, cache, queries.token_positions)
        return Hidden(states if wanted is None else states[wanted])

    def states(
        self, inputs: torch.Tensor, queries: Queries, cache: CacheGroup, positions: torch.Tensor
    ) -> torch.Tensor:
        """Of a pass whose layers are told these positions; pages are those of the queries."""
        step = PagedStep(PreparedAttention(self.attention, cache, queries), cache, slots_of(queries, cache.page_size))
        given = {"position_ids": positions[None]}
        if inputs.is_floating_point():
            given["inputs_embeds"] = inputs.to(self.dtype)[None]
        else:
            given["input_ids"] = (inputs[queries.rows] if queries.by_row else inputs)[None]
        return run(self.layers, step, self.place, **given)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self.head, hidden)
