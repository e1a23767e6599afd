"""A small decoder with a KV cache, recorded and replayed on the device that is there.

Decode is one graph per number of sequences. Prefill is recorded for a number of tokens, however many
requests they belong to: its attention, which depends on the requests, runs in gaps between the graphs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from phonograph import Buckets, Device, Extent, Graphed, Pad, Slot, current, graph_break, graphed, open_device

VOCAB, HIDDEN, HEADS, LAYERS, MAX_SEQS, MAX_LEN = 512, 128, 4, 4, 16, 128
HEAD_DIM = HIDDEN // HEADS


@dataclass
class Cache:
    """Keys and values by sequence row and position; row 0 belongs to padding."""

    keys: torch.Tensor  # [layers, max_seqs + 1, max_len, heads, head_dim]
    values: torch.Tensor

    @staticmethod
    def empty(device: torch.device) -> Cache:
        shape = (LAYERS, MAX_SEQS + 1, MAX_LEN, HEADS, HEAD_DIM)
        return Cache(torch.zeros(shape, device=device), torch.zeros(shape, device=device))


class Layer(nn.Module):
    """Attention and MLP of one layer."""

    def __init__(self, index: int, cache: Cache) -> None:
        super().__init__()
        self.index, self.cache = index, cache
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def decode(self, x: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = self._store(x, rows, positions)
        seen = torch.arange(MAX_LEN, device=x.device)[None] <= positions[:, None]  # [num_seqs, max_len]
        keys = self.cache.keys[self.index, rows].transpose(1, 2)  # [num_seqs, heads, max_len, head_dim]
        values = self.cache.values[self.index, rows].transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen[:, None, None])
        return self._finish(x, mixed[:, :, 0])

    def prefill(self, x: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = self._store(x, rows, positions)
        return self._finish(x, self.attend_requests(q))

    @graph_break
    def attend_requests(self, q: torch.Tensor) -> torch.Tensor:
        """One attention call per request of the live batch: a Python loop that no graph could hold."""
        mixed = torch.zeros_like(q)  # [num_tokens, heads, head_dim]
        start = 0
        for row, length in current().batch["requests"]:
            end = start + length
            keys = self.cache.keys[self.index, row, :length].transpose(0, 1)
            values = self.cache.values[self.index, row, :length].transpose(0, 1)
            part = q[start:end].transpose(0, 1)
            mixed[start:end] = functional.scaled_dot_product_attention(part, keys, values, is_causal=True).transpose(
                0, 1
            )
            start = end
        return mixed

    def _store(self, x: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        self.cache.keys[self.index].index_put_((rows, positions), k)
        self.cache.values[self.index].index_put_((rows, positions), v)
        return q

    def _finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + self.out(mixed.flatten(1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embeddings, layers and logits, with a decode and a prefill pass."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(MAX_LEN, HIDDEN)
        self.cache = Cache.empty(device)
        self.stack = [Layer(index, self.cache) for index in range(LAYERS)]
        self.layers = nn.ModuleList(self.stack)
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.to(device).requires_grad_(False)

    def decode(self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for layer in self.stack:
            x = layer.decode(x, rows, positions)
        return self.head(self.norm(x))

    def prefill(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, requests: list[tuple[int, int]]
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for layer in self.stack:
            x = layer.prefill(x, rows, positions)
        return x


def slots(dim: str) -> list[Slot]:
    return [
        Slot("tokens", (dim,), torch.int64, pad=Pad.fill(0), valid=(0, VOCAB - 1)),
        Slot("rows", (dim,), torch.int64, pad=Pad.fill(0, null=True), valid=(0, MAX_SEQS)),
        Slot("positions", (dim,), torch.int64, pad=Pad.fill(0), valid=(0, MAX_LEN - 1)),
    ]


def sample_decode(extent: Extent, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens, each sequence in a row of its own."""
    num_seqs = extent.used["seqs"]
    random = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, VOCAB, (num_seqs,), generator=random),
        "rows": torch.randperm(MAX_SEQS, generator=random)[:num_seqs] + 1,
        "positions": torch.randint(0, MAX_LEN, (num_seqs,), generator=random),
    }


def sample_prefill(extent: Extent, seed: int) -> dict[str, object]:
    """Two requests that share the tokens."""
    num_tokens = extent.used["tokens"]
    half = num_tokens // 2
    return prefill_batch([list(range(half)), list(range(num_tokens - half))] if half else [[seed % VOCAB] * num_tokens])


def prefill_batch(prompts: list[list[int]]) -> dict[str, object]:
    """All prompts as one run of tokens; the i-th prompt owns row i + 1."""
    return {
        "tokens": torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64),
        "rows": torch.tensor([i + 1 for i, p in enumerate(prompts) for _ in p], dtype=torch.int64),
        "positions": torch.tensor([place for prompt in prompts for place in range(len(prompt))], dtype=torch.int64),
        "requests": [(i + 1, len(prompt)) for i, prompt in enumerate(prompts)],
    }


def generate(
    model: Decoder, prefill: Graphed, decode: Graphed, prompts: list[list[int]], steps: int
) -> list[list[int]]:
    """Greedy tokens for all prompts at once."""
    batch = prefill_batch(prompts)
    hidden = prefill(**batch)
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    tokens = model.head(model.norm(hidden[ends.to(hidden.device)])).argmax(-1)
    rows = torch.arange(1, len(prompts) + 1)
    positions = torch.tensor([len(p) for p in prompts])
    out = [tokens]
    for _ in range(steps - 1):
        tokens = decode(tokens=tokens, rows=rows, positions=positions).argmax(-1)
        positions = positions + 1
        out.append(tokens)
    return torch.stack(out, 1).tolist()


def seconds(model: Decoder, prefill: Graphed, decode: Graphed, prompts: list[list[int]]) -> float:
    begin = time.perf_counter()
    generate(model, prefill, decode, prompts, 32)
    return time.perf_counter() - begin


def record(model: Decoder, device: Device, backend: str | None = None) -> tuple[Graphed, Graphed]:
    """Prefill and decode; the backends are the plan's unless one is named."""
    prefill = graphed(
        model.prefill,
        slots=slots("tokens"),
        bucketed="tokens",
        buckets=Buckets.tokens_up_to(128),
        phase="prefill",
        live=["requests"],
        backend=backend,
        sample=sample_prefill,
        device=device,
    )
    decode = graphed(
        model.decode,
        slots=slots("seqs"),
        bucketed="seqs",
        buckets=Buckets.up_to(MAX_SEQS),
        backend=backend,
        sample=sample_decode,
        device=device,
    )
    return prefill, decode


def main() -> None:
    torch.manual_seed(0)
    device = open_device()
    print(f"device: {device.name} ({device.torch_device})\n")
    model = Decoder(device.torch_device)
    graphs, eager = record(model, device), record(model, device, "disabled")
    for graph in graphs:
        print(graph.explain(), "\n")
        print(graph.capture(), "\n")
    prompts = [[1, 5, 9, 13], [7, 8], [100, 3, 3, 3, 3, 3, 42], [250] * 11, [17]]
    replayed = generate(model, *graphs, prompts, 32)
    expected = generate(model, *eager, prompts, 32)
    print(f"5 prompts, 32 tokens each: replay {'equals' if replayed == expected else 'DIFFERS FROM'} eager")
    print(f"  replay {seconds(model, *graphs, prompts):.3f} s, eager {seconds(model, *eager, prompts):.3f} s", end="")
    print(" (the emulated device is for development, not for speed)\n" if device.name == "emulated" else "\n")
    for graph in graphs:
        print(graph.runner.explain())
        print(graph.verify(), "\n")


if __name__ == "__main__":
    main()
