"""The emulated device: what it refuses and where, and that its replays are what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from phonograph import Graphed, Slot, Stage, current, graph_break, graphed
from phonograph.devices import DeviceGraph, EmulatedDevice, MemoryPool
from phonograph.devices.op_trace import OpTrace
from phonograph.devices.trace import raising_frame
from phonograph.errors import CaptureError, DataDependentShapeError, HostConstantError, HostReadError
from phonograph.graphs.progress import silent

Mode = Callable[[], AbstractContextManager[Any]]
MODES: list[Mode] = [torch.no_grad, torch.inference_mode]


@pytest.fixture(params=[False, True], ids=["plain", "poison"])
def emulated(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(poison=request.param)


def record(
    device: EmulatedDevice, body: Callable[[], Any], pool: MemoryPool | None = None, mode: Mode = torch.no_grad
) -> tuple[DeviceGraph, Any]:
    with mode(), device.recorder(pool if pool is not None else device.new_pool()) as recorder:
        recorder.begin()
        outputs = body()
        graph = recorder.end()
    return graph, outputs


# -- refusals -------------------------------------------------------------------------------------------------

Body = Callable[[torch.Tensor], object]

REFUSED: list[tuple[type[CaptureError], str, Body]] = [
    (HostReadError, "aten._local_scalar_dense", lambda x: x.sum().item()),
    (HostReadError, "aten._local_scalar_dense", lambda x: float(x[0, 0])),
    (HostReadError, "tensor_split", lambda x: x.tensor_split(x[0, :1].long())[0]),
    (HostReadError, "tensor_split", lambda x: torch.tensor_split(x, tensor_indices_or_sections=x[0, :1].long())[0]),
    (HostReadError, "aten._linalg_check_errors", lambda x: x + torch.linalg.inv(torch.eye(2) * x.sum()).sum()),
    (HostReadError, "aten._local_scalar_dense", lambda x: int(x[0, 0])),
    (HostReadError, "aten._local_scalar_dense", lambda x: x[x.argmax() % 2]),
    (HostReadError, "aten._local_scalar_dense", lambda x: 2.0 in x),
    (HostReadError, "aten._local_scalar_dense", lambda x: [float(v) for v in x[0]]),
    (HostReadError, "", lambda x: 1 if x.sum() > 0 else 2),
    (HostReadError, "", lambda x: torch.allclose(x, x)),
    (HostReadError, "aten.equal", lambda x: torch.equal(x, x)),
    (HostReadError, "Tensor.tolist", lambda x: x.tolist()),
    (HostReadError, "Tensor.numpy", lambda x: x.numpy()),
    (HostReadError, "Tensor.__array__", lambda x: np.asarray(x) + 1),
    (HostReadError, "Tensor.cpu", lambda x: x.cpu()),
    (HostReadError, "Tensor.__repr__", lambda x: print(x, "\n")),
    (DataDependentShapeError, "aten.nonzero", lambda x: x.nonzero()),
    (DataDependentShapeError, "aten.nonzero", lambda x: torch.where(x > 0)),
    (DataDependentShapeError, "aten.index.Tensor", lambda x: x[x > 0]),
    (DataDependentShapeError, "aten.masked_select", lambda x: x.masked_select(x > 0)),
    (DataDependentShapeError, "aten.index_put_", lambda x: x.clone().index_put_((x < 1e9,), x.flatten())),
    (DataDependentShapeError, "aten._unique2", lambda x: x.unique()),
    (DataDependentShapeError, "aten.bincount", lambda x: x.argsort()[0].bincount()),
    (DataDependentShapeError, "aten.repeat_interleave.Tensor", lambda x: x[0].repeat_interleave(x.argsort()[0])),
    (HostConstantError, "aten.lift_fresh", lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
    (HostConstantError, "aten.lift_fresh", lambda x: x + torch.as_tensor([1.0, 2.0, 3.0])),
    (HostConstantError, "aten.lift_fresh", lambda x: x + torch.from_numpy(np.ones(3, dtype=np.float32))),
    (HostConstantError, "aten.lift_fresh", lambda x: x + x.new_tensor([1.0, 2.0, 3.0])),
    (HostConstantError, "aten.lift_fresh", lambda x: x + torch.Tensor([1.0, 2.0, 3.0])),
    (CaptureError, "aten.rand.generator", lambda x: torch.rand(3, generator=torch.Generator())),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "op", "body"), REFUSED)
def test_a_refusal_names_the_op_and_the_users_line(kind: type[CaptureError], op: str, body: Body, mode: Mode) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(kind) as caught:
        record(EmulatedDevice(), lambda: body(x + 1), mode=mode)
    error = caught.value
    assert error.frame is not None
    assert error.frame.file == __file__
    assert error.frame.line == body.__code__.co_firstlineno
    assert error.frame.function in ("<lambda>", "<listcomp>")
    assert error.op == op or not op
    assert f"test_emulated.py:{error.frame.line}, in " in str(error)
    assert str(error).startswith(error.op)


class Model(nn.Module):
    """A host read two calls below the body, behind torch's own frames."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), Reads())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Reads(nn.Module):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()  # the line that is named


@pytest.mark.parametrize("mode", MODES)
def test_the_frame_is_the_innermost_one_of_the_user(mode: Mode) -> None:
    model, x = Model(), torch.randn(2, 3)
    with pytest.raises(HostReadError) as caught:
        record(EmulatedDevice(), lambda: model(x), mode=mode)
    frame = caught.value.frame
    assert frame is not None
    with open(__file__) as source:
        assert "the line that is named" in source.readlines()[frame.line - 1]
    assert (frame.file, frame.function) == (__file__, "forward")
    assert raising_frame(caught.tb) == frame


def test_an_undefined_number_is_refused_whoever_looks_at_it() -> None:
    """A scalar made on the host takes part like a Python number; one from the device does not."""
    x = torch.ones(3)
    graph, y = record(EmulatedDevice(), lambda: x * torch.tensor(2.0))
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    with pytest.raises(HostReadError):
        record(EmulatedDevice(), lambda: x * x[0].item())


# -- replay is what eager gives -------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Tensors that a body reads, and one that it may write."""

    x: torch.Tensor  # [4, 6]
    rows: torch.Tensor  # [4], each below 4
    mask: torch.Tensor  # [4, 6]
    image: torch.Tensor  # [2, 3, 8, 8]
    state: torch.Tensor  # [4, 6]

    @staticmethod
    def draw(seed: int) -> Inputs:
        random = torch.Generator().manual_seed(seed)
        return Inputs(
            torch.randn(4, 6, generator=random),
            torch.randperm(4, generator=random),
            torch.randn(4, 6, generator=random) > 0,
            torch.randn(2, 3, 8, 8, generator=random),
            torch.randn(4, 6, generator=random),
        )

    def take(self, other: Inputs) -> None:
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


class Block(nn.Module):
    """A small transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(6), nn.Linear(6, 18)
        self.out, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, 4, 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(4, 6))
        return x + self.down(functional.gelu(self.up(x)))


torch.manual_seed(1)
BLOCK = Block()
LINEAR, CONV, EMBED = nn.Linear(6, 5), nn.Conv2d(3, 4, 3, padding=1), nn.Embedding(4, 6)
ENCODER = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval()
LSTM = nn.LSTM(6, 5)
for module in (BLOCK, LINEAR, CONV, EMBED, ENCODER, LSTM):
    module.requires_grad_(False)  # a weight that needs a gradient makes matmul pick another kernel


def squeeze_in_place(i: Inputs) -> torch.Tensor:
    y = (i.x * 2).unsqueeze_(0)
    z = y + 1
    y.squeeze_(0)
    return y + z[0]


def transpose_in_place(i: Inputs) -> torch.Tensor:
    y = i.x + 1
    z = y * 2
    y.t_()
    y.mul_(3)
    return (y + z.t()).transpose_(0, 1) - 1


def resize_by_out(i: Inputs) -> torch.Tensor:
    out = torch.empty(0)
    torch.add(i.x, 1, out=out)
    return out * 2


def out_variants(i: Inputs) -> tuple[torch.Tensor, ...]:
    out, values, indices = torch.empty(4, 6), torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64)
    torch.mul(i.x, 2, out=out)
    torch.topk(i.x, 2, out=(values, indices))
    torch.cumsum(i.x, 0, out=i.state)
    return out, values, indices


def views(i: Inputs) -> tuple[torch.Tensor, ...]:
    y = i.x * 2
    part = y[1:3, ::2]
    part.add_(10)
    y.view(-1)[::7].zero_()
    y.narrow(1, 2, 2).fill_(7)
    y.diagonal().neg_()
    return y, part, y.t(), y.unfold(1, 3, 2), y.view(2, 2, 6).select(0, 1)


def write_by_index(i: Inputs) -> tuple[torch.Tensor, ...]:
    y = torch.zeros(4, 6)
    y.index_put_((i.rows,), i.x)
    y[i.rows, 1] = 5.0
    y.index_add_(0, i.rows, i.x)
    y.scatter_(1, i.rows[:, None], 9.0)
    y.scatter_add_(0, i.rows[:, None].expand(4, 6), i.x)
    y[i.mask] = -1.0
    i.state.index_copy_(0, i.rows, i.x)
    i.state[2:].copy_(i.x[:2])
    return y, y.gather(1, i.rows[:, None]), y[i.rows], y.index_select(0, i.rows)


def several_results(i: Inputs) -> tuple[torch.Tensor, ...]:
    values, indices = i.x.max(dim=1)
    left, right = i.x.split([2, 4], dim=1)
    return (
        *i.x.topk(3),
        *i.x.sort(descending=True),
        *i.x.chunk(3, 1),
        *i.x.unbind(0),
        *torch.var_mean(i.x, 1),
        *torch.aminmax(i.x, dim=0),
        *i.x.median(1),
        values,
        indices,
        left * right[:, :2],
    )


def made_inside(i: Inputs) -> tuple[torch.Tensor, ...]:
    scratch = torch.empty(4, 6)
    scratch.copy_(i.x)
    filled = torch.full((4, 4), float("-inf")).triu_(1)
    return (
        scratch,
        filled + i.x[:, :4],
        torch.zeros(4) + torch.ones(4) * torch.arange(4) + torch.linspace(0, 1, 4) + i.x[:, 0],
        torch.empty_like(i.x).fill_(2) + i.x,
        i.x.new_zeros(4, 6) + torch.eye(4, 6),
        torch.zeros_like(i.x).masked_fill_(i.mask, 3),
    )


def dtypes(i: Inputs) -> tuple[torch.Tensor, ...]:
    half, whole = torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(4, 6, dtype=torch.int32)
    half.copy_(i.x)
    whole.copy_(i.x * 100)
    i.state.copy_(half)
    return half, whole, i.x.to(torch.float64), i.x.half().float(), i.x.view(torch.int32), half.view(torch.int16)


def random_numbers(i: Inputs) -> tuple[torch.Tensor, ...]:
    return (
        torch.rand(4, 6) + i.x,
        torch.randn_like(i.x),
        torch.randint(0, 9, (4,)),
        torch.randperm(7),
        torch.empty(4).exponential_(),
        functional.dropout(i.x, 0.5, training=True),
        torch.bernoulli(torch.full((4, 6), 0.5)),
        torch.multinomial(i.x.softmax(-1), 2),
        i.state.uniform_(),
    )


def writes_state(i: Inputs) -> torch.Tensor:
    i.state.mul_(2)
    before = i.state.clone()
    i.state.add_(i.x)
    i.state.view(-1)[:3] = 0
    torch._foreach_add_([i.state, i.state.t()], 1.0)
    return before + i.state


def attention(i: Inputs) -> tuple[torch.Tensor, ...]:
    q = i.x.view(1, 4, 2, 3).transpose(1, 2)
    mask = i.mask[:, :4].logical_or(torch.eye(4, dtype=torch.bool))
    return (
        functional.scaled_dot_product_attention(q, q, q),
        functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4).masked_fill(~mask, float("-inf"))),
    )


def encoder(i: Inputs) -> torch.Tensor:
    # torch's fused path, which it takes only where no mode watches, differs in the last bits.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return ENCODER(i.x[None])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


OPS: dict[str, Callable[[Inputs], Any]] = {
    "arithmetic": lambda i: ((i.x * 2 + 1).exp() / 3 - i.state).clamp(-1, 5),
    "where": lambda i: torch.where(i.mask, i.x, i.state) + torch.where(i.mask, 1.0, 0.0),
    "masked_fill": lambda i: i.x.masked_fill(i.mask, -1e9).softmax(-1),
    "masked_scatter": lambda i: i.x.masked_scatter(i.mask, i.state),
    "cumsum": lambda i: (i.x.cumsum(1), i.x.logcumsumexp(0), i.x.cummax(1)),
    "reductions": lambda i: (i.x.sum(), i.x.mean(1), i.x.amax(0), i.x.argmax(1), i.x.std(1), i.x.norm(), i.mask.any(1)),
    "matmul": lambda i: (i.x @ i.x.t(), torch.einsum("ij,kj->ik", i.x, i.state), torch.addmm(i.x[:, :4], i.x, i.x.t())),
    "linear of rows": lambda i: LINEAR(i.x),
    "linear of one row": lambda i: LINEAR(i.x[0]),
    "linear of three dims": lambda i: LINEAR(i.x.view(2, 2, 6)),
    "linear of a transposed input": lambda i: LINEAR(i.x.view(2, 2, 6).transpose(0, 1)),
    "layer norm": lambda i: (functional.layer_norm(i.x, (6,)), functional.rms_norm(i.x, (6,))),
    "conv": lambda i: functional.max_pool2d(functional.silu(CONV(i.image)), 2),
    "embedding": lambda i: EMBED(i.rows),
    "one_hot": lambda i: functional.one_hot(i.rows, 4),
    "attention": attention,
    "block": lambda i: BLOCK(i.x),
    "encoder": encoder,
    "lstm": lambda i: LSTM(i.x)[0],
    "reshape": lambda i: (i.x.t().reshape(-1), i.x.reshape(-1), i.x.flatten()[None].expand(3, -1), i.x.repeat(2, 1)),
    "cat": lambda i: (torch.cat([i.x, i.state]), torch.stack([i.x, i.state], 1), functional.pad(i.x, (1, 2))),
    "complex": lambda i: (
        torch.fft.rfft(i.x).abs(),
        torch.fft.fft(i.x).conj().resolve_conj(),
        torch.fft.fft(i.x).conj().imag,
    ),
    "returns an input": lambda i: (i.x, i.x.view(-1), i.state.add_(1)),
    "nothing at all": lambda i: None,
    "squeeze_": squeeze_in_place,
    "t_ and transpose_": transpose_in_place,
    "out=": out_variants,
    "out= of another size": resize_by_out,
    "views": views,
    "write by index": write_by_index,
    "several results": several_results,
    "made inside": made_inside,
    "dtypes": dtypes,
    "random": random_numbers,
    "state": writes_state,
}


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for item in tree or () for tensor in tensors(item)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPS)
def test_replay_is_what_eager_gives(emulated: EmulatedDevice, name: str, mode: Mode) -> None:
    body, held = OPS[name], Inputs.draw(0)
    pool = emulated.new_pool()
    record(emulated, lambda: body(held), pool, mode)  # memory for a poisoning device to overwrite
    random_state = torch.get_rng_state()
    graph, outputs = record(emulated, lambda: body(held), pool, mode)
    assert torch.equal(torch.get_rng_state(), random_state)
    for one, other in zip(tensors(vars(held).values()), tensors(vars(Inputs.draw(0)).values()), strict=True):
        assert torch.equal(one, other), "recording has changed an input"
    addresses = [t.data_ptr() for t in tensors(outputs)]
    for seed in (1, 2, 1):
        eager = Inputs.draw(seed)
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = body(eager)
        held.take(Inputs.draw(seed))
        torch.manual_seed(seed)
        graph.replay()
        torch.testing.assert_close(tensors(outputs), tensors(expected), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(held.state, eager.state, rtol=0, atol=0)
        torch.testing.assert_close(held.x, eager.x, rtol=0, atol=0)
        assert [t.data_ptr() for t in tensors(outputs)] == addresses


@pytest.mark.parametrize("name", [*OPS, "upsampled"])
def test_inference_mode_runs_the_ops_of_every_other_mode(name: str) -> None:
    """Composite ops reach a watch whole there, and must be taken apart as torch itself does."""

    def ops(mode: Mode) -> list[str]:
        trace, held = OpTrace(), Inputs.draw(0)
        body = OPS.get(name, lambda i: functional.interpolate(i.image, scale_factor=2.0))
        with mode(), trace.following():
            body(held)
        return [op.name for op in trace.ops if op.name != "aten.detach"]  # autograd's own

    assert ops(torch.inference_mode) == ops(torch.no_grad)


def test_a_replay_runs_no_python() -> None:
    calls: list[int] = []
    x = torch.ones(2)

    def body() -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    graph, y = record(EmulatedDevice(), body)
    for _ in range(3):
        graph.replay()
    assert calls == [1]
    assert y.tolist() == [2, 2]


def test_state_of_a_replay_carries_over_to_the_next() -> None:
    state = torch.zeros(2)
    graph, y = record(EmulatedDevice(), lambda: state.add_(1) * 10)
    for count in range(1, 4):
        graph.replay()
        assert y.tolist() == [count * 10] * 2
    assert state.tolist() == [3, 3]


def test_the_callers_autocast_does_not_reach_into_a_replay() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 6)
    graph, y = record(EmulatedDevice(), lambda: x @ w)
    with torch.autocast("cpu"):
        graph.replay()
    assert torch.equal(y, x @ w)


def test_autocast_in_the_body_is_recorded() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 6)

    def body() -> torch.Tensor:
        with torch.autocast("cpu"):
            return x @ w

    graph, y = record(EmulatedDevice(), body)
    x.normal_()
    graph.replay()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, body())


# -- memory ---------------------------------------------------------------------------------------------------


def test_outputs_hold_nothing_before_the_first_replay(emulated: EmulatedDevice) -> None:
    x = torch.ones(3)
    graph, y = record(emulated, lambda: x + 1)
    assert y.tolist() != [2, 2, 2]
    graph.replay()
    assert y.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_poison_overwrites_what_other_recordings_left(dtype: torch.dtype) -> None:
    device = EmulatedDevice(poison=True)
    pool, x = device.new_pool(), torch.ones(3)
    first, left = record(device, lambda: (x * 5).to(dtype), pool)
    second, y = record(device, lambda: x + 2, pool)
    first.replay()
    assert left.tolist() == torch.full((3,), 5).to(dtype).tolist()
    second.replay()
    assert left.tolist() != torch.full((3,), 5).to(dtype).tolist()
    assert torch.isfinite(left).all()
    assert y.tolist() == [3, 3, 3]
    assert x.tolist() == [1, 1, 1]


def test_without_poison_other_recordings_memory_stays() -> None:
    device = EmulatedDevice()
    pool, x = device.new_pool(), torch.ones(3)
    first, left = record(device, lambda: x * 5, pool)
    second, _ = record(device, lambda: x + 2, pool)
    first.replay()
    second.replay()
    assert left.tolist() == [5, 5, 5]


def test_poison_spares_the_graphs_of_the_same_recording() -> None:
    device = EmulatedDevice(poison=True)
    x = torch.ones(3)
    with torch.no_grad(), device.recorder(device.new_pool()) as recorder:
        recorder.begin()
        y = x + 1
        first = recorder.end()
        recorder.begin()
        z = y * 10
        second = recorder.end()
    first.replay()
    second.replay()
    assert z.tolist() == [20, 20, 20]


def test_both_poisons_are_finite_and_differ() -> None:
    device = EmulatedDevice()
    pool, x = device.new_pool(), torch.ones(3)
    _, tensors_made = record(device, lambda: (x + 1, x.double(), x > 0, x.half(), torch.fft.fft(x)), pool)
    pool.poison(0)
    first = [tensor.clone() for tensor in tensors_made]
    pool.poison(1)
    for one, other in zip(first, tensors_made, strict=True):
        assert not torch.equal(one, other)
        assert torch.isfinite(one).all()
        assert torch.isfinite(other).all()


def test_reading_uninitialised_memory_shows(emulated: EmulatedDevice) -> None:
    x, pool = torch.ones(3), emulated.new_pool()
    graph, y = record(emulated, lambda: x + torch.empty(3), pool)
    results = []
    for pattern in (0, 1):
        pool.poison(pattern)
        graph.replay()
        results.append(y.tolist())
    assert results[0] != results[1]


@pytest.mark.parametrize("poison", [True, False])
def test_what_a_replay_wrote_is_poisoned_again(poison: bool) -> None:
    """Memory that has the pattern since no replay wrote there is left alone; no other is."""
    device = EmulatedDevice(poison=poison)
    pool, x = device.new_pool(), torch.ones(3)
    graph, y = record(device, lambda: x + 1, pool)
    other, z = record(device, lambda: x * 10, pool)
    for pattern in (0, 0, 1, 1, 0):
        pool.poison(pattern)
        before = y.tolist(), z.tolist()
        graph.replay()
        assert y.tolist() == [2, 2, 2] != before[0]
        assert z.tolist() == ([-191.0] * 3 if poison else before[1])
        other.replay()
        assert z.tolist() == [10, 10, 10] != before[1]
        assert y.tolist() == ([-191.0] * 3 if poison else [2, 2, 2])


def test_memory_counts_what_recordings_hold() -> None:
    device = EmulatedDevice()
    assert device.memory().used == 0
    x = torch.ones(256)
    graph, _ = record(device, lambda: (x + 1).view(16, 16) * 2)
    assert device.memory().used == 2 * 256 * 4
    other, _ = record(device, lambda: x + 1)
    assert device.memory().used == 3 * 256 * 4
    graph.release()
    assert device.memory().used == 256 * 4
    other.release()
    assert device.memory().used == 0


def test_a_failed_recording_holds_no_memory() -> None:
    device = EmulatedDevice()
    with pytest.raises(ZeroDivisionError):
        record(device, lambda: torch.ones(100) / (1 // 0))
    assert device.memory().used == 0


class TestOpsThatTakeFunctions:
    """torch compiles them when they are called; under a mode they run by the ops that they are made of."""

    def made(self, body: Callable[[torch.Tensor], torch.Tensor], width: int) -> Graphed:
        slots = [Slot("x", ("seqs", width), torch.float32)]
        return graphed(body, slots=slots, bucketed="seqs", buckets=[2, 4], device="emulated")

    @pytest.mark.slow
    def test_flex_attention_is_recorded(self) -> None:
        def body(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(-1, 2, 4, 8)
            attended = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score * 0.5)
            assert isinstance(attended, torch.Tensor)
            return attended.reshape(x.shape)

        made = self.made(body, 64)
        report = made.capture(silent)
        assert not report.failures, report
        assert made.verify().ok
        x = torch.randn(3, 64)
        torch.testing.assert_close(made(x), body(x))
        assert made.stats.replays.total() == 1

    @pytest.mark.slow
    def test_cond_is_refused_by_name(self) -> None:
        def body(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,))

        made = self.made(body, 4)
        report = made.capture(silent)
        assert len(report.failures) == 2
        text = str(report.failures[0].error)
        assert "torch.ops.higher_order.cond branches on a device value" in text
        assert "test_emulated.py:" in text
        assert text.endswith("choose with torch.where, or mark the function @graph_break and use backend='breakable'")
        for x in (torch.ones(2, 4), -torch.ones(2, 4)):
            torch.testing.assert_close(made(x), x * 2 if x.sum() > 0 else x * 3)


def test_libraries_are_told_that_a_capture_goes_on() -> None:
    """Wherever the capture would say so, under every name, on this thread only; and not in gaps, nor afterwards."""
    asked = torch.cuda.is_current_stream_capturing
    answers: dict[Stage, set[bool]] = {}

    def is_capturing() -> bool:
        with suppress(RuntimeError):  # torch for CPUs only has no answer of its own
            return asked() and torch.cuda.graphs.is_current_stream_capturing()
        return False

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        assert not is_capturing()
        return x

    spy = Mock()

    def body(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as elsewhere:
            spy(current().stage, is_capturing(), elsewhere.submit(is_capturing).result())
        return gap(x) * 2

    slots = [Slot("x", ("seqs", 4), torch.float32)]
    made = graphed(body, slots=slots, bucketed="seqs", buckets=[2], device="emulated", backend="breakable")
    assert not made.capture(silent).failures
    for call in spy.call_args_list:
        stage, here, elsewhere = call.args
        answers.setdefault(stage, set()).add(here)
        assert not elsewhere
    assert answers == {Stage.WARMING: {False, True}, Stage.CAPTURING: {True}}, "free warm-ups are no capture"
    assert not is_capturing()
