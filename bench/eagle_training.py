"""EagleTraining: an EAGLE-3 head with gradients, computed as the engine computes it, and what training minimises.

At a start p the head has read the target's states up to p, and knows token p + 1. Step d of its chain is at position
p + d: its inputs are token p + 1 + d and, after the first step, its own state of the step before; its keys are those
made of the target's states up to p, and its own of the chain. All starts of a sequence are computed at once. Tokens are
the sequence's own, so that a step is what a draft would be as long as all drafts before it were right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.rope import rope_table

ATTENTION, MLP = "midlayer.self_attn.", "midlayer.mlp."
SIZE = 4.0
"""Root mean square of the features that training begins with."""
LOGITS = 8192
"""Rows of logits that are computed at a time."""
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how long."""

    depth: int = 4
    """Steps of a chain."""
    draft_vocab: int = 16_384
    width: float = 2.0
    """Of the head's feed-forward part, in widths of the target's."""
    steps: int = 12_000
    batch_tokens: int = 24_576
    rate: float = 2e-3
    optimizer: str = "muon"
    """Of matrices: muon or adamw."""
    warm_up: float = 0.02
    """Share of the steps in which the rate rises; it falls by a cosine afterwards."""
    further: float = 0.9
    """Weight of each further step of a chain, times that of the one before."""
    hidden_weight: float = 0.2
    """Of the loss between hidden states, beside that between distributions."""
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Sequences, padded at the end, with what the target computed for them."""

    tokens: torch.Tensor  # [num_seqs, length]
    taps: torch.Tensor  # [num_seqs, length, num_taps * hidden]
    states: torch.Tensor  # [num_seqs, length, hidden]: what the target's logits are made of
    best: torch.Tensor  # [num_seqs, length]: the likeliest next token
    first: torch.Tensor  # [num_seqs]: tokens of the prompt
    length: torch.Tensor  # [num_seqs]


def _divergence(drafted: torch.Tensor, likely: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Between the distributions of two logits, summed over rows; and its gradient by the first."""
    mine, theirs = drafted.float().log_softmax(-1), likely.float().log_softmax(-1)
    return (theirs.exp() * (theirs - mine)).sum(), (mine.exp() - theirs.exp()).to(drafted.dtype)


class _Divergence(torch.autograd.Function):
    """The same of two states, some rows at a time: the logits of all of them would take gigabytes a step."""

    _compiled = staticmethod(torch.compile(_divergence, dynamic=True))

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        compute = _Divergence._compiled if rows.is_cuda else _divergence
        total, gradients = torch.zeros((), device=rows.device), list[torch.Tensor]()
        for mine, theirs in zip(states.split(LOGITS), wanted.split(LOGITS), strict=True):
            found, gradient = compute(mine.to(rows.dtype) @ rows.mT, theirs.to(rows.dtype) @ rows.mT)
            total += found
            gradients.append((gradient @ rows).to(states.dtype))
        ctx.save_for_backward(torch.cat(gradients) if gradients else torch.zeros_like(states))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] * ctx.saved_tensors[0], None, None


def taps_of(config: ModelConfig) -> tuple[int, ...]:
    """An early layer, one in the middle, and the last."""
    last = config.num_layers - 1
    return tuple(sorted({config.num_layers // 15, config.num_layers // 2, last}))


class Head:
    """Weights by the names of the published layout, in float32, and the arithmetic over them."""

    def __init__(self, target: Decoder, ids: torch.Tensor, recipe: Recipe, num_positions: int) -> None:
        self.config, self.recipe, self.ids = target.config, recipe, ids
        self.taps = taps_of(self.config)
        # Copies: weights of an engine are tensors of inference mode.
        self._embedding = target.weights.embedding.clone()
        self._rows = target.weights.head.values()[ids].clone()
        # As the folder's configuration has it: without the scaling that a target may have.
        rope = rope_table(replace(self.config, rope_scaling=None), num_positions + recipe.depth, ids.device)
        self._cos, self._sin = rope.cos, rope.sin
        self.intermediate = round(self.config.intermediate * recipe.width / 64) * 64 or 64
        self.weights = {name: weight.requires_grad_() for name, weight in self._warm(target).items()}

    def _warm(self, target: Decoder) -> dict[str, torch.Tensor]:
        """The target's last layer, which reads hidden states; what is new begins small, or with nothing."""
        config, layer = self.config, target.weights.layers[-1]
        hidden, kept, on = config.hidden, config.intermediate, self.ids.device
        numbers = torch.Generator().manual_seed(self.recipe.seed)

        def small(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=numbers) * 0.2 / columns**0.5).to(on)

        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        found = {"fc.weight": small(hidden, len(self.taps) * hidden)}
        for name, part in zip("qkv", layer.qkv.values().float().split(sizes), strict=True):
            found[f"{ATTENTION}{name}_proj.weight"] = torch.cat([small(*part.shape), part], 1)
        found[f"{ATTENTION}o_proj.weight"] = layer.out.values().float().clone()
        gate_up, down = layer.gate_up.values().float().chunk(2), layer.down.values().float()
        more = max(0, self.intermediate - kept)
        for name, part in zip(("gate", "up"), gate_up, strict=True):
            wide = small(more, hidden) * 5 * hidden**0.5 * part.std()
            found[f"{MLP}{name}_proj.weight"] = torch.cat([part[: self.intermediate], wide])
        nothing = torch.zeros(hidden, more, device=on)
        found[f"{MLP}down_proj.weight"] = torch.cat([down[:, : self.intermediate], nothing], 1)
        norms = (layer.input_norm, layer.mlp_norm, target.weights.norm)
        found[f"{NORMS[0]}.weight"] = torch.ones(hidden, device=on)
        for name, norm in zip(NORMS[1:], norms, strict=True):
            found[f"{name}.weight"] = norm.weight.float().clone()
        return found

    def scale_to(self, taps: torch.Tensor) -> None:
        """Let the fused features begin as the last tapped state, at a size that steps of the optimizer can move; what
        the layer adds to them is made as much smaller."""
        hidden = self.config.hidden
        size = taps[..., -hidden:].float().square().mean(-1).sqrt().median()
        with torch.no_grad():
            self.weights["fc.weight"][:, -hidden:] += torch.eye(hidden, device=size.device) * SIZE
            for name in (f"{ATTENTION}o_proj", f"{MLP}down_proj"):
                self.weights[f"{name}.weight"] *= SIZE / size

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"])

    def _fused(self, taps: torch.Tensor) -> torch.Tensor:
        parts = taps.float().unflatten(-1, (len(self.taps), -1))
        normed = functional.rms_norm(parts, parts.shape[-1:], eps=self.config.rms_eps)
        return self._linear(normed.flatten(-2), "fc")

    def _heads(self, x: torch.Tensor, name: str, first: int | None) -> torch.Tensor:
        """[num_seqs, heads, length, head_dim], turned by positions from `first` on where that is given."""
        split = self._linear(x, f"{ATTENTION}{name}_proj").unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        if first is not None:
            cos, sin = (part[first : first + x.shape[1]] for part in (self._cos, self._sin))
            split = split * cos + split.roll(self.config.head_dim // 2, -1) * sin
        repeated = self.config.num_heads // split.shape[1]
        return split.repeat_interleave(repeated, 1) if repeated > 1 else split

    def unrolled(self, batch: Batch, depth: int) -> Iterator[torch.Tensor]:
        """For each step of a chain its hidden states, by start: [num_seqs, length, hidden]."""
        hidden, length = self._fused(batch.taps), batch.tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        keys, values = list[torch.Tensor](), list[torch.Tensor]()
        for place in range(depth):
            tokens = functional.pad(batch.tokens[:, 1 + place :], (0, 1 + place))
            embedded = self._normed(functional.embedding(tokens, self._embedding), NORMS[0])
            x = torch.cat([embedded, self._normed(hidden, NORMS[1])], -1)
            q = self._heads(x, "q", place)
            keys.append(self._heads(x, "k", place))
            values.append(self._heads(x, "v", None))
            # Of the first step all keys up to the start; of the steps since, those of the same chain.
            # In plain products: lengths differ from batch to batch, and a fused kernel may be planned anew for each.
            scores = [(q @ keys[0].mT).masked_fill(later, -torch.inf)]
            scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
            shares = (torch.cat(scores, -1) * self.config.head_dim**-0.5).float().softmax(-1).to(q.dtype)
            mixed = shares[..., :length] @ values[0]
            for number, value in enumerate(values[1:]):
                mixed = mixed + shares[..., length + number, None] * value
            x = hidden + self._linear(mixed.transpose(1, 2).flatten(-2), f"{ATTENTION}o_proj")
            inner = self._normed(x, NORMS[2])
            gated = functional.silu(self._linear(inner, f"{MLP}gate_proj")) * self._linear(inner, f"{MLP}up_proj")
            hidden = x + self._linear(gated, f"{MLP}down_proj")
            yield hidden

    def _trained(self, batch: Batch, place: int) -> torch.Tensor:
        """[num_seqs, length]: the starts from which this step says something about an output."""
        starts = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return (starts >= batch.first[:, None] - 1) & (starts + place + 2 < batch.length[:, None])

    def loss(self, batch: Batch) -> torch.Tensor:
        """How far distributions over the draft vocabulary are from the target's, where its likeliest token is in it;
        and how far the state that logits are made of is turned from the target's."""
        known = torch.zeros(self.config.vocab, dtype=torch.bool, device=self.ids.device)
        known[self.ids] = True
        total, weights = torch.zeros((), device=self.ids.device), 0.0
        for place, hidden in enumerate(self.unrolled(batch, self.recipe.depth)):
            ahead = place + 1  # the position whose logits the step foretells
            best = functional.pad(batch.best[:, ahead:], (0, ahead))
            chosen = self._trained(batch, place) & known[best]
            states = self._normed(hidden, NORMS[3])[chosen]
            wanted = functional.pad(batch.states[:, ahead:], (0, 0, 0, ahead))[chosen].float()
            tokens = _Divergence.apply(states, wanted, self._rows)
            turned = (1 - functional.cosine_similarity(states.float(), wanted, dim=-1)).sum()
            weight = self.recipe.further**place
            total = total + weight * (tokens + self.recipe.hidden_weight * turned) / max(1, len(states))
            weights += weight
        return total / weights

    @torch.no_grad()
    def right(self, batch: Batch, depth: int) -> torch.Tensor:
        """[num_seqs, length, depth]: whether each step drafts, from each start, the token that the sequence has."""
        found = []
        for place, hidden in enumerate(self.unrolled(batch, depth)):
            states = self._normed(hidden, NORMS[3])
            drafted = self.ids[functional.linear(states, self._rows.float()).argmax(-1)]
            wanted = functional.pad(batch.tokens[:, place + 2 :], (0, place + 2), value=-1)
            found.append(drafted == wanted)
        return torch.stack(found, -1)

    def write(self, folder: Path) -> int:
        """The folder that --draft takes; returns the bytes of its weights. Embeddings and logits are the target's."""
        config = self.config
        fields: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": config.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab,
            "draft_vocab_size": len(self.ids),
            "max_position_embeddings": config.max_len,
            "rope_theta": config.rope_theta,
            "rms_norm_eps": config.rms_eps,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps), "norms_features": True},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        stored = {name: weight.detach().half().cpu().contiguous() for name, weight in self.weights.items()}
        ids = self.ids.cpu()
        save_file({**stored, "d2t": ids - torch.arange(len(ids))}, folder / "model.safetensors")
        return (folder / "model.safetensors").stat().st_size


def draft_vocabulary(outputs: Sequence[Sequence[int]], config: ModelConfig, size: int) -> torch.Tensor:
    """The most frequent tokens of these texts, and those that end them; in order."""
    counts = torch.zeros(config.vocab, dtype=torch.int64)
    for output in outputs:
        counts += torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=config.vocab)
    counts[list(config.eos_ids)] += 1 << 40
    return counts.argsort(descending=True, stable=True)[: min(size, config.vocab)].sort().values


def rounds_of(right: Sequence[Sequence[bool]], first: int, length: int) -> tuple[int, int]:
    """(rounds, tokens) of one sequence whose prompt has `first` tokens: each round takes the drafts that are right, one
    after the other, and the target's own token after them."""
    rounds = tokens = 0
    start = first - 1
    while start + 2 < length:
        accepted = next((place for place, ok in enumerate(right[start]) if not ok), len(right[start]))
        brought = min(accepted + 1, length - start - 2)
        rounds, tokens, start = rounds + 1, tokens + brought, start + brought
    return rounds, tokens
