"""Bugs of padding: rows that nobody asked for change those of others, or state that outlives the call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phonograph import Pad, Slot
from zoo.animals import WIDTH, Mechanism, Run, Subject, X, calling, ints, rows, sampled
from zoo.judge import bug
from zoo.python_state import repeated

OUTPUTS, WRITES = Mechanism.OUTPUTS, Mechanism.WRITES


@bug(OUTPUTS)
def mean_over_the_batch(on: torch.device) -> Subject:
    """Each row is centred by the mean of all rows."""
    return repeated(lambda x: x - x.mean(0), on)


@bug(OUTPUTS)
def leak_beside_large_values(on: torch.device) -> Subject:
    """The leak of a mean stands in the same tensor as columns of the size of a million."""

    def step(x: Tensor) -> Tensor:
        return torch.cat([x * 1e6, x - x.mean(0)], dim=-1)

    return repeated(step, on)


@bug(OUTPUTS)
def leak_beside_one_large_row(on: torch.device) -> Subject:
    """One row with an outlier token is a thousand times larger than the row that padding leaks into."""

    def step(x: Tensor) -> Tensor:
        return torch.cat([x[:1] * 1e5, (x - x.mean(0))[1:]])

    return repeated(step, on)


@bug(OUTPUTS)
def small_leak_in_half_precision(on: torch.device) -> Subject:
    """A float16 output has a leak of one part in a hundred."""

    def step(x: Tensor) -> Tensor:
        return (x + 0.02 * x.sum(0) / x.shape[0]).half()

    return repeated(step, on)


@bug(OUTPUTS)
def batch_norm_in_training(on: torch.device) -> Subject:
    """BatchNorm in training takes its statistics from padded rows too."""
    norm = nn.BatchNorm1d(WIDTH).to(on).train()
    return repeated(calling(norm), on, lambda: [norm.running_mean, norm.running_var])


@bug(WRITES)
def moving_average_over_padding(on: torch.device) -> Subject:
    """A moving average of activations counts padded rows; outputs don't show it."""
    average = torch.zeros(WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x * 2

    return repeated(step, on, lambda: average)


@bug(WRITES)
def expert_load_counts_padding(on: torch.device) -> Subject:
    """A load balancer counts the tokens of each expert, and padded ones all go to expert 0."""
    load = torch.zeros(WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        expert = x.argmax(-1)
        load.index_add_(0, expert, torch.ones_like(expert, dtype=torch.float32))
        return x.gather(-1, expert[:, None])

    return repeated(step, on, lambda: load)


@bug(WRITES)
def tokens_counted_by_shape(on: torch.device) -> Subject:
    """A device counter of tokens is advanced by the padded number of rows."""
    num_tokens = torch.zeros((), dtype=torch.int64, device=on)

    def step(x: Tensor) -> Tensor:
        num_tokens.add_(x.shape[0])
        return x + 1

    return repeated(step, on, lambda: num_tokens)


@bug(WRITES)
def padded_row_writes_a_live_page(on: torch.device) -> Subject:
    """Padding points at page 0 of the KV cache, which belongs to a sequence."""
    cache = torch.zeros(8, WIDTH, device=on)
    page = Slot("page", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 7))

    def step(x: Tensor, page: Tensor) -> Tensor:
        cache[page] = x
        return cache[page] * 2

    def calls(run: Run) -> None:
        run(x=rows(on, 4, 1), page=ints(on, 0, 1, 2, 3))
        run(x=rows(on, 3, 2), page=ints(on, 4, 5, 6))
        run(x=rows(on, 1, 3), page=ints(on, 7))

    return Subject(step, calls, slots=[X, page], state=lambda: cache)


@bug(WRITES)
def padding_wraps_to_the_last_page(on: torch.device) -> Subject:
    """Padding has length 0, and length - 1 names the last page, which is a live one."""
    cache = torch.zeros(8, WIDTH, device=on)
    lens = Slot("lens", ("rows",), torch.int64, pad=Pad.fill(0, because="an empty sequence"), valid=(1, 8))

    def step(x: Tensor, lens: Tensor) -> Tensor:
        cache[lens - 1] = x
        return x * lens[:, None]

    def calls(run: Run) -> None:
        run(x=rows(on, 4, 1), lens=ints(on, 8, 7, 6, 5))
        run(x=rows(on, 3, 2), lens=ints(on, 1, 2, 3))

    return Subject(step, calls, slots=[X, lens], state=lambda: cache)


@bug(OUTPUTS)
def last_row_is_padding(on: torch.device) -> Subject:
    """The logits of the last token are taken from the last row, which is padding."""
    return repeated(lambda x: x[-1] * 2, on)


@bug(OUTPUTS, harmless_on_gpu="draws of up to some thousand numbers advance a GPU's generator equally, padded or not")
def random_numbers_shifted_by_padding(on: torch.device) -> Subject:
    """Two draws in a row: the second begins where the first, padded one, has ended."""

    def step(x: Tensor) -> Tensor:
        torch.rand(x.shape, device=x.device)
        return x + torch.rand(x.shape, device=x.device)

    return repeated(step, on)


@bug(OUTPUTS)
def output_buffer_partly_written(on: torch.device) -> Subject:
    """Every other column of a torch.empty is written, and all are returned."""

    def step(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, ::2] = x[:, ::2]
        return out

    def calls(run: Run) -> None:
        for count in (3, 8, 2):
            run(x=rows(on, count))[:, 1::2] = 0

    return Subject(step, calls)


@bug(OUTPUTS, names="index|IndexError", kills_gpu=True)
def index_legal_only_without_padding(on: torch.device) -> Subject:
    """A running sum of lengths indexes a table; padded rows, of length 4, run past its end."""
    table = torch.arange(16.0, device=on)
    lens = Slot("lens", ("rows",), torch.int64, pad=Pad.fill(4), valid=(1, 4))

    def step(x: Tensor, lens: Tensor) -> Tensor:
        return x + table[lens.cumsum(0)][:, None]

    def calls(run: Run) -> None:
        run(x=rows(on, 3), lens=ints(on, 1, 2, 1))
        run(x=rows(on, 5), lens=ints(on, 1, 2, 1, 1, 1))

    def sample(extent: object, seed: int) -> dict[str, Tensor]:
        count = extent.used["rows"]  # type: ignore[attr-defined]
        return {"x": rows(on, count, seed), "lens": torch.ones(count, dtype=torch.int64, device=on)}

    return Subject(step, calls, slots=[X, lens], options={"sample": sample})


@bug(OUTPUTS)
def capacity_from_the_padded_size(on: torch.device) -> Subject:
    """An expert's capacity is a share of the padded number of tokens, so that fewer tokens are dropped."""

    def step(x: Tensor) -> Tensor:
        capacity = -(-x.shape[0] // 2)
        expert = functional.one_hot((x[:, 0] > -9).long(), 2)
        place = (expert.cumsum(0) * expert).sum(-1)
        return x * (place <= capacity)[:, None]

    return repeated(step, on)


@bug(OUTPUTS)
def special_path_for_one_row(on: torch.device) -> Subject:
    """A batch of one takes a path of its own, which a bucket of four never does."""

    def calls(run: Run) -> None:
        for count in (3, 1, 8):
            run(x=rows(on, count))

    return Subject(lambda x: x * 2 if x.shape[0] == 1 else x * 3, calls)


@bug(
    OUTPUTS,
    open="SILENT: all sizes are tried, and a cast to float16 may move what comes after it by float16's rounding",
)
def special_path_inside_a_bucket(on: torch.device) -> Subject:
    """A tuned kernel serves exactly six rows, between the sizes that verify tries, and rounds."""

    def step(x: Tensor) -> Tensor:
        return x.half().float() if x.shape[0] == 6 else x * 1

    def calls(run: Run) -> None:
        for count in (3, 6, 8):
            run(x=rows(on, count))

    return Subject(step, calls)


@bug(Mechanism.OTHER, open="SILENT: samples are positive, and a pad of 0 is neutral for them alone")
def maximum_over_positive_samples(on: torch.device) -> Subject:
    """A maximum over the batch; the sampler draws from 0 to 1, real batches are negative."""
    positive = Slot("x", ("rows", WIDTH), torch.float32)

    def sample(extent: object, seed: int) -> dict[str, Tensor]:
        return {"x": rows(on, extent.used["rows"], seed).abs()}  # type: ignore[attr-defined]

    def calls(run: Run) -> None:
        run(x=-rows(on, 3).abs() - 1)

    return Subject(lambda x: x - x.amax(0), calls, slots=[positive], options={"sample": sample})


@bug(OUTPUTS)
def scale_of_the_whole_batch(on: torch.device) -> Subject:
    """Dynamic quantisation takes one scale for the batch, and the pad token's embedding is the largest."""
    table = torch.linspace(9, 1, 8, device=on)[:, None].expand(8, WIDTH).contiguous()
    token = Slot("token", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 7))

    def step(token: Tensor) -> Tensor:
        h = table[token]
        scale = h.abs().amax() / 7
        return (h / scale).round() * scale

    def calls(run: Run) -> None:
        run(token=ints(on, 5, 6, 7))

    return Subject(step, calls, slots=[token])


@bug(OUTPUTS)
def rows_sorted(on: torch.device) -> Subject:
    """Rows are sorted by score before they are returned, padding among them."""
    return repeated(lambda x: x[x[:, 0].argsort()], on)


@bug(OUTPUTS)
def tail_claimed_unread(on: torch.device) -> Subject:
    """A slot says that nobody reads its padding, and a sum does."""
    unread = Slot("x", ("rows", WIDTH), torch.float32, pad=Pad.unread(because="rows are independent"))

    def calls(run: Run) -> None:
        run(x=rows(on, 8, 1))
        run(x=rows(on, 5, 2))

    return Subject(lambda x: x + x.sum(0), calls, slots=[unread], options={"sample": sampled(on, unread)})


@bug(OUTPUTS)
def integer_leak(on: torch.device) -> Subject:
    """A rank among all rows is an integer, and padded rows have ranks too."""
    return repeated(lambda x: (x[:, :1] > x[:, 0]).sum(-1), on)


@bug(WRITES)
def running_maximum_over_padding(on: torch.device) -> Subject:
    """An observer keeps the largest value of each channel; padded rows of 0 are in it."""
    largest = torch.full((WIDTH,), -100.0, device=on)

    def step(x: Tensor) -> Tensor:
        torch.maximum(largest, x.amax(0), out=largest)
        return x * 2

    def calls(run: Run) -> None:
        run(x=rows(on, 3).abs() * -1 - 1)
        run(x=rows(on, 5).abs() * -1 - 1)

    return Subject(step, calls, state=lambda: largest)


@bug(WRITES)
def ring_buffer_advanced_by_padding(on: torch.device) -> Subject:
    """A ring of the last tokens is advanced by all rows, so that padding pushes real ones out."""
    ring = torch.zeros(16, WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        ring.copy_(torch.cat([ring, x])[-16:])
        return x * 2

    return repeated(step, on, lambda: ring)
