"""TritonSampler: two launches for a step's tokens, two for their log-probabilities, and no sort."""

from __future__ import annotations

import torch
import triton

from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import SamplingRows, TopLogprobs
from phonograph.engine.sampling.triton.picking import CHUNK, KEPT, favourites, rank, settle, survey
from phonograph.engine.state.columns import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P


class TritonSampler:
    """The protocol `Sampler`, for logits in any float type; picks the tokens that the torch sampler picks."""

    name = "triton"
    columns = (TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED)
    rows = SamplingRows

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        if rows is None:
            # A greedy kernel reads none of them.
            rows, level = SamplingRows(*[logits] * 6), Sampling.GREEDY
        num_rows, vocab = logits.shape
        num_chunks = triton.cdiv(vocab, CHUNK)
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows == 0:
            return out
        greedy, truncated, precise = level is Sampling.GREEDY, level >= Sampling.TRUNCATED, logits.device.type != "cpu"
        tops, masses = torch.empty((2, num_rows, num_chunks), device=logits.device).unbind(0)
        tokens = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
        survey[(num_rows, num_chunks)](
            logits, rows.temperature, rows.seed, rows.positions, tokens, tops, masses,
            logits.stride(0), vocab, num_chunks,
            chunk=CHUNK, is_greedy=greedy, with_mass=truncated, precise=precise, num_warps=4,
        )  # fmt: skip
        kept = torch.empty((num_rows, KEPT), dtype=torch.int32, device=logits.device) if truncated else tokens
        settle[(num_rows,)](
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.positions,
            tokens, tops, masses, kept, out, logits.stride(0), vocab, num_chunks,
            chunks=triton.next_power_of_2(num_chunks), kept=KEPT, is_greedy=greedy, truncated=truncated,
            precise=precise, num_warps=16 if truncated else 1,
        )  # fmt: skip
        return out

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
        num_rows, vocab = logits.shape
        most, num_chunks = min(count, vocab), triton.cdiv(vocab, CHUNK)
        on, columns = logits.device, triton.next_power_of_2(max(1, most))
        ids = torch.empty((num_rows, most), dtype=torch.int64, device=on)
        logprobs = torch.empty((num_rows, most), device=on)
        logprob = torch.empty(num_rows, device=on)
        if num_rows == 0:
            return TopLogprobs(logprob, ids, logprobs)
        tops, masses = torch.empty((2, num_rows, num_chunks), device=on).unbind(0)
        values = torch.empty((num_rows, num_chunks, most), device=on)
        found = torch.empty((num_rows, num_chunks, most), dtype=torch.int32, device=on)
        favourites[(num_rows, num_chunks)](
            logits, values, found, tops, masses, logits.stride(0), vocab, num_chunks,
            chunk=CHUNK, most=most, columns=columns, num_warps=4,
        )  # fmt: skip
        rank[(num_rows,)](
            logits, tokens, values, found, tops, masses, logprob, ids, logprobs, logits.stride(0), vocab, num_chunks,
            chunks=triton.next_power_of_2(num_chunks), most=most, columns=columns,
            found=triton.next_power_of_2(num_chunks * max(1, most)), num_warps=4,
        )  # fmt: skip
        return TopLogprobs(logprob, ids, logprobs)
