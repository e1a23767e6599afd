"""Model and Family: protocols of a model, and of the module that a family of models is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch

from phonograph.engine.cache.groups import CacheGroup, Kept
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.tensors import ModelTensor, ModelWeights
from phonograph.engine.ops.kernels import Kernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Attention, Queries
from phonograph.engine.options import HfOps
from phonograph.engine.state.column import Column


@dataclass(frozen=True)
class Hidden:
    """What a pass through the layers gives."""

    states: torch.Tensor  # [num_wanted, hidden], normed: what `Model.logits` takes
    taps: tuple[torch.Tensor, ...] = ()
    """For each tapped layer the residual stream after it, [num_tokens, hidden]: of all tokens, wanted or not."""


class Model(Protocol):
    """Weights and the arithmetic over them. It has no state of its own: passes of all shapes share it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weights(self) -> object:
        """All of them: tensors in dataclasses and tuples."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of what layers keep."""

    @property
    def max_len(self) -> int:
        """How many positions it knows."""

    @property
    def attention(self) -> Attention: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def keeps(self) -> tuple[Kept, ...]:
        """What each layer keeps of the tokens before; a cache group is made from it."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """State that it keeps of a sequence as a whole, which passes alone write: `CacheGroup.by_row` has the tensors.

        A row with a new owner must begin with the default, and nothing can be taken back from such state: a model
        that has some shares no prefixes, and decodes one token a step.
        """

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Every matrix that something is projected with, that of the logits last."""

    def hidden(
        self,
        inputs: torch.Tensor,
        queries: Queries,
        cache: CacheGroup,
        wanted: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Hidden states of the wanted tokens, or of all; the cache gets what the layers keep of every token.

        Inputs are token ids, or, where they are floating point, embeddings ([num_tokens, hidden]). Where the queries
        go by row, token ids are the table of all rows' last tokens; embeddings are those of the step.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of these rows, in the model's precision."""
        ...

    def with_attention(self, attention: Attention) -> Self:
        """The same model, weights shared, with another attention."""
        ...

    def with_kernels(self, kernels: Kernels) -> Self:
        """The same model, weights shared, with other kernels."""
        ...


@runtime_checkable
class Noted(Protocol):
    """A model about which something was found when it was loaded."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences, for `explain`."""


@dataclass(frozen=True)
class ModelParts:
    """What a family makes a model from, besides its configuration and weights."""

    attention: Attention
    kernels: Kernels
    max_len: int
    residual: torch.dtype | None = None
    """Of the residual stream; None for that of the weights."""
    hf_ops: HfOps = "fused"
    """Of a transformers model."""


class Family(Protocol):
    """A module for models of one arithmetic; `registry.ARCHITECTURES` names it."""

    def config_from_hf(self, fields: Fields, architecture: str) -> ModelConfig:
        """From the fields of a Hugging Face config.json; refuses what the family does not compute."""
        ...

    def config_from_gguf(self, fields: Fields, architecture: str, tensor_names: Collection[str]) -> ModelConfig:
        """From the metadata of a GGUF file; its tensor names tell what the metadata leave out."""
        ...

    def tensors(self, config: ModelConfig) -> Sequence[ModelTensor]:
        """Every tensor that a model of this configuration consists of."""
        ...

    def build(self, config: ModelConfig, weights: ModelWeights, parts: ModelParts) -> Model:
        """The model, from its weights by place; the matrices are prepared for its kernels."""
        ...
