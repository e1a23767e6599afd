"""Norms of adapted models: which are found, how they are proven, and what is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("triton")
import torch
from torch import nn

from adapted import SERVED, greedy, made, saved
from phonograph import LLM
from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels, TracedKernels
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.row_norm import RowNorm, norm_rows
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.tuning import Tuning
from phonograph.engine.options import EngineOptions, HfOps
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError, PlanError
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.progress import Progress, silent
from phonograph.hf.adapter.checkpoint import HfCheckpoint
from phonograph.hf.adapter.model import HfModel
from phonograph.hf.adapter.norms import fused_norms
from phonograph.hf.adapter.self_check import self_check
from phonograph.hf.adapter.twins import Fused, reached, twin_of
from unit.test_hf_adapter import Wrong

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = TritonKernels(DEVICE, Tuning({}))
WIDTH = 16


class TorchNorms(ReferenceKernels):
    """Row norms in torch's ops, counted: for what does not depend on a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor | None:
        self.launched += 1
        return norm_rows(x, weight, norm)


class Plain(nn.Module):
    """Llama's norm, with a place where others do something else."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = eps

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x.to(torch.float32)).to(x.dtype)


class Centred(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x - x.mean(-1, keepdim=True))


class Clamped(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x.clamp(-1000, 1000))


class OutputClamped(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x).clamp(-3.5, 3.5)


class ResultClamped(Plain):
    """At what a row of zeros but one reaches, where the weight is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(max=0.9 * WIDTH**0.5 * self.weight.max().item())


class ResultBelow(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(min=-0.9 * WIDTH**0.5 * self.weight.abs().max().item())


class ColumnBounded(Plain):
    """In one column alone, whichever it is."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        found = super().scaled(x)
        found[..., 11] = found[..., 11].clamp(-0.95 * WIDTH**0.5, 0.95 * WIDTH**0.5)
        return found


class Ranged(Plain):
    """Rows of a size that most trials have not."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        size = x.pow(2).mean(-1, keepdim=True).sqrt()
        return super().scaled(x) * torch.where((size > 6e3) & (size < 3e4), 0.5, 1.0)


class Padded(Plain):
    """Rows that have zeros."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * torch.where((x == 0).any(-1, keepdim=True) & (x != 0).any(-1, keepdim=True), 2, 1)


class OneSided(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * torch.where((x < 0).all(-1, keepdim=True), 3, 1)


class ManyTokens(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * (1.5 if x.ndim == 3 and x.shape[1] > 1000 else 1.0)


class TwoTokens(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * (1.5 if x.ndim == 3 and x.shape[1] == 2 else 1.0)


class Scaled(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * 1.0005


class EpsOutside(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class AnotherEps(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.1 * self.variance_epsilon)


class Finite(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x.nan_to_num())


class OverBatch(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + self.variance_epsilon)


class OneToken(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) * (2.0 if x.shape[:-1].numel() == 1 else 1.0)


class SummedHalf(Plain):
    """Statistics in the dtype of the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x)


class Cubic(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() ** 3 * self.scaled(x.to(torch.float32))).to(x.dtype)


class InPlace(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().forward(x))


class Wide(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


class Counting(Plain):
    """Computes what it should, until it does not."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (2.0 if self.calls > 1000 else 1.0)


class Peaked(Plain):
    """Notes what it has seen in a tensor that is no buffer, as code that calibrates does."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.peak.copy_(torch.maximum(self.peak, x.abs().amax().cpu()))
        return super().forward(x)


class Listing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"shapes": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["shapes"].append(len(x))
        return super().forward(x)


class Buffering(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("last", x, persistent=False)
        return super().forward(x)


class Weighing(Plain):
    """Writes its weight, by nothing most of the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(1.0 if x.isfinite().all() else 1.5)
        return super().forward(x)


class Holding(Plain):
    """Something of which nobody knows what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.log = iter(())


class Circular(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.ring: list[Any] = []
        self.ring.append(self.ring)


class Around(Plain):
    """Plain as a whole; the weight is applied around `forward`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * super().__call__(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x.to(torch.float32)).to(x.dtype)


class Gated(Plain):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * gate


class MaybeGated(Plain):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        found = super().forward(x)
        return found if gate is None else found * gate


UNLIKE: dict[type[Plain], str] = {
    **dict.fromkeys(
        (
            *(Centred, Clamped, OutputClamped, ResultClamped, ResultBelow, ColumnBounded, Ranged, Padded, OneSided),
            *(Scaled, EpsOutside, AnotherEps, Finite, OverBatch, OneToken, TwoTokens, ManyTokens, Cubic, InPlace, Wide),
        ),
        "on trial rows no plain root-mean-square norm",
    ),
    **dict.fromkeys((Counting, Peaked, Listing, Buffering, Weighing), "state of its own"),
    Holding: "no trial knows whether its attribute log, a tuple_iterator, is changed",
    Circular: "a trial raised RecursionError",
    Around: "__call__ is not that of torch.nn.Module",
    Gated: "a trial raised TypeError",
}


def tree(*norms: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*norms).to(DEVICE, dtype).requires_grad_(False).eval()


def rows(dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(1, 5, width).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", UNLIKE)
def test_what_is_not_a_plain_norm_is_left_alone(kind: type[Plain], dtype: torch.dtype) -> None:
    layers = tree(kind(), dtype=dtype)
    weight, held = layers[0].weight.clone(), repr(sorted(vars(layers[0]).items()))  # type: ignore[operator]
    found = fused_norms(layers, TRITON)
    assert found.layers is layers
    assert torch.equal(weight, layers[0].weight)
    assert repr(sorted(vars(layers[0]).items())) == held
    assert found.notes[0].startswith(f"1 {kind.__name__} in transformers' own ops: {UNLIKE[kind]}"), found.notes


def test_a_kernel_that_differs_is_left_out() -> None:
    class Off(TorchNorms):
        def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor | None:
            return norm_rows(x, weight, replace(norm, eps=2 * norm.eps))

    class Choosy(TorchNorms):
        def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor | None:
            return norm_rows(x, weight, norm) if x.is_contiguous() else None

    layers = tree(Plain())
    for kernels, why in ((Off(), "our kernel differs by more than rounding"), (Choosy(), "our kernel takes no rows")):
        found = fused_norms(layers, kernels)
        assert found.layers is layers
        assert why in found.notes[0]


def test_statistics_in_half_precision_are_left_alone() -> None:
    layers = tree(SummedHalf(), dtype=torch.float16)
    assert fused_norms(layers, TRITON).layers is layers


def test_one_that_is_not_plain_is_left_alone_among_others() -> None:
    layers = tree(Plain(), Centred(), Plain())
    found = fused_norms(layers, TRITON)
    assert [one for one in found.notes if one.startswith("2 Plain as one launch each")]
    assert [one for one in found.notes if one.startswith("1 Centred in transformers' own ops")]
    assert found.layers[1] is layers[1]
    assert found.layers[0] is not layers[0]


def test_an_attribute_tells_norms_of_a_class_apart() -> None:
    class Sneaky(Plain):
        extra = 1.0

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return super().scaled(x) * self.extra

    layers = tree(Sneaky(), Sneaky(), Sneaky(eps=1e-5))
    layers[1].extra = 1.5  # type: ignore[assignment]
    found = fused_norms(layers, TRITON)
    assert [one is layers[place] for place, one in enumerate(found.layers)] == [False, True, False]


def test_every_norm_is_tried_with_its_own_weights() -> None:
    class Peculiar(Plain):
        """Plain for random weights."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.where((self.weight == 1).all(), 2.0, 1.0)

    layers = tree(Peculiar(), Peculiar())
    nn.init.ones_(layers[1].weight)  # type: ignore[arg-type]
    found = fused_norms(layers, TRITON)
    assert [one is layers[place] for place, one in enumerate(found.layers)] == [False, True]


def test_outliers_come_where_own_weights_are_large() -> None:
    """Random weights do not reach the bound; those of one norm do, in one column and with one sign."""

    class Bounded(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(min=-40.0)

    layers = tree(Bounded(), Bounded())
    layers[1].weight[5] = 12.0  # type: ignore[operator]
    found = fused_norms(layers, TRITON)
    assert [one is layers[place] for place, one in enumerate(found.layers)] == [False, True]


def test_state_that_does_not_change_tells_norms_apart_by_value() -> None:
    class Listed(Plain):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factors = [torch.tensor(factor)]

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return super().scaled(x) * self.factors[0].to(x.device)

    layers = tree(Listed(1.0), Listed(1.5), Listed(1.0))
    found = fused_norms(layers, TRITON)
    assert [one is layers[place] for place, one in enumerate(found.layers)] == [False, True, False]


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH, bias=False),
        lambda: nn.RMSNorm(WIDTH, eps=1e-6),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ],
)
def test_other_modules_are_no_candidates(other: Callable[[], nn.Module]) -> None:
    layers = tree(other())
    assert fused_norms(layers, TRITON) == Fused(layers, ())


def test_more_than_a_weight_is_no_candidate() -> None:
    biased, buffered = Plain(), Plain()
    biased.bias = nn.Parameter(torch.zeros(WIDTH))
    buffered.register_buffer("count", torch.zeros(()))
    layers = tree(biased, buffered)
    assert fused_norms(layers, TRITON) == Fused(layers, ())


def test_a_norm_with_hooks_is_left_alone() -> None:
    layers, seen = tree(Plain(), Plain()), list[str]()
    layers[0].register_forward_hook(lambda *_: seen.append("hook"))
    found = fused_norms(layers, TRITON)
    assert [one.partition(":")[0] for one in found.notes] == [
        "1 Plain in transformers' own ops",
        "1 Plain as one launch each",
    ]
    assert "hooks" in found.notes[0]
    assert found.layers[0] is layers[0]
    assert seen == []  # no trial ran it
    found.layers(rows())
    assert seen == ["hook"]


def test_hooks_that_come_later_run() -> None:
    layers, seen = tree(Plain()), list[str]()
    fused = fused_norms(layers, TRITON).layers
    handle = layers[0].register_forward_hook(lambda *_: seen.append("hook"))
    fused(rows())
    handle.remove()
    fused(rows())
    assert seen == ["hook"]


def test_a_forward_of_somebody_else_is_left_alone() -> None:
    layers = tree(Plain(), Plain())
    layers[0].forward = lambda x: x
    found = fused_norms(layers, TRITON)
    assert found.layers[0] is layers[0]
    assert "1 Plain in transformers' own ops: forward is not that of the class" in found.notes


class TestCalls:
    """A fused norm computes what was tried in one launch, and anything else as its module does."""

    def fused(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, TorchNorms]:
        kernels = TorchNorms()
        layers = tree(module, dtype=dtype)
        found = fused_norms(layers, kernels).layers
        kernels.launched = 0
        return layers[0], found[0], kernels

    def test_plain_calls_are_launches(self) -> None:
        own, fused, kernels = self.fused(Plain())
        assert torch.equal(fused(rows := torch.randn(2, 3, WIDTH, device=DEVICE)), own(rows))
        assert kernels.launched == 1

    def test_other_dtypes_and_arguments_are_the_modules_own(self) -> None:
        own, fused, kernels = self.fused(MaybeGated(), torch.float16)
        x = rows(torch.float16)
        assert torch.equal(fused(x, x), own(x, x))
        assert torch.equal(fused(x=x), own(x=x))
        assert torch.equal(fused(x, gate=x), own(x, gate=x))
        assert torch.equal(fused(x.float()), own(x.float()))
        assert kernels.launched == 0
        assert torch.equal(fused(x), own(x))
        assert kernels.launched == 1

    def test_gradients_are_the_modules_own(self) -> None:
        _, fused, kernels = self.fused(Plain())
        x = rows().requires_grad_()
        fused(x).sum().backward()
        assert kernels.launched == 0
        assert x.grad is not None

    def test_shapes_without_storage_are_the_modules_own(self) -> None:
        _, fused, kernels = self.fused(Plain())
        with pytest.raises(RuntimeError):
            fused(torch.empty(2, WIDTH, device="meta"))
        assert kernels.launched == 0

    def test_weights_are_shared(self) -> None:
        own, fused, _ = self.fused(Plain())
        own.weight.mul_(2)
        x = rows()
        assert torch.equal(fused(x), own(x))
        own.weight = nn.Parameter(torch.zeros(WIDTH, device=DEVICE))
        assert not fused(x).any()

    def test_what_others_ask_of_it_is_there(self) -> None:
        own, fused, _ = self.fused(Plain())
        assert type(fused) is Plain
        assert (fused.variance_epsilon, fused.weight) == (own.variance_epsilon, own.weight)


class TestTwins:
    def test_only_the_way_to_what_is_replaced_is_copied(self) -> None:
        model = made(SERVED["Qwen3"])
        norm = model.model.layers[1].self_attn.q_norm
        other = copy.copy(norm)
        twin = twin_of(model.model, {id(norm): other})
        assert twin.layers[1].self_attn.q_norm is other
        assert model.model.layers[1].self_attn.q_norm is norm
        assert twin.layers[0] is model.model.layers[0]
        assert twin.layers[1].mlp is model.model.layers[1].mlp
        assert twin.rotary_emb is model.model.rotary_emb
        assert {id(one) for one in twin.parameters()} == {id(one) for one in model.model.parameters()}

    def test_a_module_in_two_places_is_one(self) -> None:
        shared = Plain()
        layers = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
        assert len(list(reached(layers))) == 4
        twin = twin_of(layers, {id(shared): Plain()})
        assert twin[0][0] is twin[1][0]

    def test_below_a_forward_of_its_own_nothing_is_replaced(self) -> None:
        """That may be bound to the module, and run what is below it there."""
        inner = nn.Sequential(Plain())
        inner.forward = inner.forward  # type: ignore[method-assign]
        layers = nn.Sequential(inner, Plain())
        found = fused_norms(layers.requires_grad_(False).to(DEVICE), TRITON)
        assert found.layers[0] is inner
        assert found.notes[0].startswith("1 Plain as one launch")


NORMS = {
    "Llama": 5, "Qwen2": 5, "Qwen3": 9, "Gemma 2": 9, "Gemma 3": 13, "gpt-oss": 5, "OLMo 2": 9, "Granite": 5,
    "DeepSeek-V3": 9, "Cohere 2": 0, "GPT-2": 0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_families(name: str, dtype: torch.dtype) -> None:
    model = made(SERVED[name]).to(DEVICE, dtype).requires_grad_(False)
    ids = torch.arange(3, 12, device=DEVICE)[None]
    before = {one: dict(vars(module)) for one, module in model.named_modules()}
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        found = fused_norms(model, TRITON)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        assert {one: dict(vars(module)) for one, module in model.named_modules()} == before
        count = sum("forward" in vars(one) for one in found.layers.modules())
        assert count == NORMS[name]
        if count:
            assert f"{count} {type(model).__name__.removesuffix('ForCausalLM')}RMSNorm as one launch" in found.notes[0]
            near = found.layers(input_ids=ids, use_cache=False).logits
            near_by = 1e-5 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(near, wanted, rtol=near_by, atol=near_by)


def test_two_models_in_one_process() -> None:
    """A model that is adapted leaves another of the same classes as it was."""
    first, second = (made(SERVED["Qwen3"]).to(DEVICE).requires_grad_(False) for _ in range(2))
    kernels, other = TorchNorms(), TorchNorms()
    fused = fused_norms(first, kernels).layers
    kernels.launched = 0
    ids = torch.arange(3, 12, device=DEVICE)[None]
    with torch.no_grad():
        second(input_ids=ids)
        assert kernels.launched == 0
        fused(input_ids=ids)
        assert kernels.launched == NORMS["Qwen3"]
        twice = fused_norms(second, other).layers
        other.launched = kernels.launched = 0
        twice(input_ids=ids)
        first(input_ids=ids)
    assert (kernels.launched, other.launched) == (0, NORMS["Qwen3"])


@dataclass(frozen=True)
class WithKernels(HfCheckpoint):
    """Whose model is loaded with kernels that launch norms."""

    kernels: Any = None

    def model(self, parts: ModelParts, dtype: torch.dtype, device: torch.device, progress: Progress = silent) -> Model:
        made = super().model(replace(parts, kernels=self.kernels), dtype, device, progress)
        self.kernels.launched = 0
        return made


def loaded(folder: Path, kernels: Any, hf_ops: HfOps = "fused", dtype: torch.dtype = torch.float32) -> HfModel:
    parts = ModelParts(ReferenceAttention(), kernels, 40, hf_ops=hf_ops)
    model = load_model(HfCheckpoint.open(folder), parts, dtype, DEVICE)
    assert isinstance(model, HfModel)
    return model


def logits_of(model: HfModel) -> torch.Tensor:
    count = 9
    table = torch.arange(4, dtype=torch.int32, device=DEVICE).expand(2, 4).contiguous()
    cache = CacheGroup.empty(model.keeps, 5, 4, dtype=model.dtype, device=DEVICE)
    queries = Queries(torch.ones(count).long().to(DEVICE), torch.arange(count, device=DEVICE), table, None)
    with torch.inference_mode():
        return model.logits(model.hidden(torch.arange(3, 3 + count, device=DEVICE), queries, cache).states)


class TestLoaded:
    @pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3", "OLMo 2", "Mistral"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_the_load_check_compares_with_the_models_own(self, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
        """Windows too, which are crossed in both."""
        model = loaded(saved(made(SERVED[name]), tmp_path), TRITON, dtype=dtype)
        assert model.fused is not None
        assert "checked against the model's own eager attention" in model.notes[0]
        assert "RMSNorm as one launch each" in model.notes[1]
        assert not [one for one in model.whole.modules() if "forward" in vars(one)]
        found = getattr(model.whole.config, "sliding_window", None)
        assert found == getattr(SERVED[name].config(), "sliding_window", None)

    def test_the_load_check_refuses_norms_that_are_wrong(self, tmp_path: Path) -> None:
        model = loaded(saved(made(SERVED["Llama"]), tmp_path), TRITON)
        wrong = copy.copy(model.fused.layers[0].input_layernorm)
        wrong.forward = lambda x: x
        twin = twin_of(model.fused, {id(model.fused.layers[0].input_layernorm): wrong})
        with pytest.raises(CheckpointError, match="other logits"):
            self_check(replace(model, fused=twin), "wrong")

    @pytest.mark.parametrize("fault", ["wrong", "raises"])
    def test_without_them_where_only_they_fail_the_load_check(self, tmp_path: Path, fault: str, caplog: Any) -> None:
        class Late(TorchNorms):
            """Wrong for as many tokens as the load check has, and no trial."""

            def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor | None:
                if x.shape[:2] != (1, 36):
                    return super().norm_rows(x, weight, norm)
                if fault == "raises":
                    raise RuntimeError("no such launch")
                return norm_rows(x, weight, norm).flip(-1)

        model = loaded(saved(made(SERVED["Llama"]), tmp_path), Late())
        assert model.fused is None
        assert "checked against the model's own eager attention" in model.notes[0]
        assert [one for one in model.notes if "as one launch each" in one] == [model.notes[1]]
        assert model.notes[1].startswith("norms and rotations in transformers' own ops: ")
        warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert [one for one in warned if "--hf-ops own" in one]
        plain = loaded(tmp_path, TorchNorms(), "own")
        assert torch.equal(logits_of(model), logits_of(plain))

    def test_what_fails_the_load_check_in_any_case_is_refused(self, tmp_path: Path) -> None:
        parts = ModelParts(Wrong("history"), TorchNorms(), 40)
        with pytest.raises(CheckpointError, match="Its attention, or its positions"):
            load_model(HfCheckpoint.open(saved(made(SERVED["Llama"]), tmp_path)), parts, torch.float32, DEVICE)

    def test_what_is_compiled_runs_the_models_own(self, tmp_path: Path) -> None:
        kernels = TorchNorms()
        model = loaded(saved(made(SERVED["Qwen3"]), tmp_path), kernels)
        kernels.launched = 0
        wanted = logits_of(model.with_kernels(TracedKernels()))
        assert kernels.launched == 0
        torch.testing.assert_close(logits_of(model), wanted)
        assert kernels.launched == NORMS["Qwen3"]

    def test_it_is_left_out_where_asked_or_where_nothing_launches_them(self, tmp_path: Path) -> None:
        folder, kernels = saved(made(SERVED["Llama"]), tmp_path), TorchNorms()
        for model in (loaded(folder, kernels, "own"), loaded(folder, ReferenceKernels())):
            assert model.fused is None
            assert len(model.notes) == 1
        assert kernels.launched == 0

    def test_other_values_of_the_option_are_refused(self) -> None:
        with pytest.raises(PlanError, match="hf_ops is one of fused, own; found 'fast'"):
            EngineOptions(hf_ops="fast")  # type: ignore[arg-type]


PROMPTS = [[5, 9, 11], [7, 3, 60, 61, 62, 63, 64, 65, 66]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3", "OLMo 2"])
@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_recordings_have_them(tmp_path: Path, name: str, backend: str) -> None:
    """Recorded, verified, its facts checked, and with the tokens of plain transformers, on the emulated device."""
    plain, kernels = made(SERVED[name]), TorchNorms()
    folder = saved(plain, tmp_path)
    opened = HfCheckpoint.open(folder)
    checkpoint = WithKernels(folder, opened.fields, opened.generation, kernels=kernels)
    asked = [ask("tc_compiler", "eager", origin="test")]
    asked.append(ask("idle.backend", "disabled", origin="test"))
    for phase, buckets in (("decode", (1, 2)), ("prefill", (8, 16))):
        asked.append(ask(f"{phase}.backend", backend, origin="test"))
        asked.append(ask(f"{phase}.buckets", buckets, origin="test"))
        asked.append(ask(f"{phase}.max_recordings", len(buckets), origin="test"))
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=40, page_size=4, model_impl="hf")
    llm = LLM(checkpoint, device="emulated", options=options, asked=asked)
    assert [str(row.error) for report in llm.reports for row in report.failures] == []
    assert all(report.ok for report in llm.verified.values())
    assert "RMSNorm as one launch each" in llm.explain()
    assert bool(kernels.launched) == (backend != "tc_piecewise")
    assert [one.tokens for one in llm.generate(PROMPTS, GREEDY)] == [greedy(plain, one, 6) for one in PROMPTS]
    for runner in llm.executor.runners.values():
        assert not runner.stats.eager, runner.stats.eager
