"""MtpModules: modules that predict further tokens, as DeepSeek-V3 publishes them; module k the one k + 2 ahead.

A module joins a token's embedding (`enorm`) and a hidden state (`hnorm`) by `eh_proj`, and runs one decoder layer. The
first takes the target's states of a position, as they go into its logits, and the token after it. Each further one
takes the states of the module before it, and a token one place further on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from phonograph.engine.models.draft_layers import DraftLayers, DraftStep
from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.projections import linear, norm_linear


@dataclass(frozen=True)
class MtpModule:
    """What a module consists of, besides its layer."""

    token_norm: Norm
    hidden_norm: Norm
    fuse: Matrix  # [hidden, 2 * hidden]: of token, then hidden state
    norm: Norm
    head: Matrix  # [vocabulary, hidden]; the target's, where it is the same


@dataclass(frozen=True)
class MtpModules:
    """Weights and the arithmetic over them; they have no state of their own."""

    embedding: torch.Tensor  # the target's
    target_norm: Norm
    tap: int
    """The last layer of the target."""
    modules: tuple[MtpModule, ...]
    layers: DraftLayers
    """One of each module."""

    def features(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """[num_tokens, hidden]: the target's states as its own logits take them."""
        return self.layers.kernels.add_norm(taps[0], None, self.target_norm)[0]

    def store(
        self,
        index: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        is_known: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what a module keeps of some positions: (its attention queries, the residual stream before attention).

        Where the hidden state is not known, key and value are zero: such a position weighs next to nothing.
        """
        kernels, own, layer = self.layers.kernels, self.modules[index], self.layers.weights[index]
        embedded = functional.embedding(tokens, self.embedding).to(hidden.dtype)
        joined = kernels.joined_norms((embedded, hidden), (own.token_norm, own.hidden_norm))
        x = linear(kernels, joined, own.fuse)
        qkv, x = norm_linear(kernels, x, None, layer.input_norm, layer.qkv)
        if is_known is not None:
            qkv = torch.where(is_known[:, None], qkv, 0.0)
        return step.store(index, qkv), x

    def likeliest(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The token that is most likely to come next, by the states of a module."""
        kernels, own = self.layers.kernels, self.modules[index]
        normed = kernels.add_norm(hidden, None, own.norm)[0]
        return linear(kernels, normed, own.head).argmax(-1)
