"""Bugs of global modes: torch is told to compute otherwise after capture, and a replay does not hear it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo.addresses import Net
from zoo.animals import WIDTH, Mechanism, Run, Subject, calling, rows
from zoo.judge import bug
from zoo.python_values import changed

MODES = Mechanism.MODES


def under(body: Callable[..., object], on: torch.device, mode: Callable[[], AbstractContextManager[object]]) -> Subject:
    """A call outside of a mode, one inside, one outside again."""

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        with mode():
            run(x=rows(on, 3, 2))
            run(x=rows(on, 8, 3))
        run(x=rows(on, 3, 4))

    return Subject(body, calls)


@bug(MODES, names="training")
def train_called(on: torch.device) -> Subject:
    """`.train()` turns on a dropout that zeroes everything."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(1.0)).to(on).eval()
    return changed(calling(model), on, model.train, model.eval)


@bug(MODES, names="training")
def one_submodule_in_training(on: torch.device) -> Subject:
    """Only a submodule is set to training: its own flag, not the model's."""
    dropout = nn.Dropout(1.0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(dropout)).to(on).eval()
    return changed(calling(model), on, dropout.train)


@bug(MODES, names="autocast", has_line=False)
def autocast_entered(on: torch.device) -> Subject:
    """Calls are made inside torch.autocast, which the recording was not made in."""
    model = Net().to(on)
    return under(model, on, lambda: torch.autocast(on.type, dtype=torch.float16))


@bug(MODES, names="autocast", has_line=False)
def autocast_read(on: torch.device) -> Subject:
    """A library asks for the autocast state and rounds by itself, as custom kernels do."""

    def step(x: Tensor) -> Tensor:
        return x.half().float() * 3 if torch.is_autocast_enabled(x.device.type) else x * 3

    return under(step, on, lambda: torch.autocast(on.type, dtype=torch.float16))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@bug(MODES, names="default dtype|default_dtype", has_line=False)
def default_dtype_changed(on: torch.device) -> Subject:
    """The body makes tensors of the default dtype, which is changed later."""

    def step(x: Tensor) -> Tensor:
        return x + torch.ones(WIDTH, device=x.device) / 3

    return under(step, on, lambda: default_dtype(torch.float64))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@bug(MODES, names="deterministic", has_line=False)
def deterministic_algorithms(on: torch.device) -> Subject:
    """The body picks its algorithm by whether deterministic ones are asked for; the fast one rounds."""

    def step(x: Tensor) -> Tensor:
        return x.cumsum(-1) if torch.are_deterministic_algorithms_enabled() else x.half().cumsum(-1).float()

    return under(step, on, deterministic)


@bug(MODES, names="sdp|attention|SDP", has_line=False)
def attention_backend_changed(on: torch.device) -> Subject:
    """The body asks which attention kernels are allowed, and scales for one of them."""

    def step(x: Tensor) -> Tensor:
        q = x[None, :, None]
        y = functional.scaled_dot_product_attention(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2))
        return x * (y.numel() if torch.backends.cuda.flash_sdp_enabled() else 1.0) / x.numel()

    return under(step, on, lambda: sdpa_kernel([SDPBackend.MATH]))


@contextmanager
def matmul_precision(word: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@bug(MODES, names="precision", has_line=False)
def matmul_precision_lowered(on: torch.device) -> Subject:
    """A fused layer looks at the precision of float32 products and rounds its operands by it."""

    def step(x: Tensor) -> Tensor:
        return x * 2 if torch.get_float32_matmul_precision() == "highest" else (x * 2).half().float()

    return under(step, on, lambda: matmul_precision("medium"))


@bug(Mechanism.VALUES, names="tracks")
def grad_mode_set_by_a_flag(on: torch.device) -> Subject:
    """The body sets the grad mode by the model's own flag, and picks a path by it."""
    model = SimpleNamespace(tracks=False)

    def step(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(model.tracks):
            return x * 2 if torch.is_grad_enabled() else x * 3

    return changed(step, on, lambda: setattr(model, "tracks", True))


@bug(MODES, harmless="outputs of replays have no graph of derivatives, as those of eager calls do not")
def grad_left_on(on: torch.device) -> Subject:
    """Capture and calls are made with gradients on, over weights that need them."""
    model = Net().to(on)

    found: list[Tensor] = []

    def calls(run: Run) -> None:
        with torch.enable_grad():
            found.extend(run(x=rows(on, 3, seed)) for seed in (1, 2))

    return Subject(model, calls, state=lambda: [one.requires_grad for one in found])


@bug(MODES, names="hook", has_line=False)
def forward_hook_added(on: torch.device) -> Subject:
    """A forward hook is registered on a submodule after capture."""
    model = Net().to(on)
    return changed(model, on, lambda: model.linear.register_forward_hook(lambda module, args, out: out * 2))


@bug(MODES, names="hook")
def forward_hook_on_a_module_in_a_closure(on: torch.device) -> Subject:
    """A hook is registered on a module that the graphed function only calls."""
    model = Net().to(on)

    def step(x: Tensor) -> Tensor:
        return model(x) + 1

    return changed(step, on, lambda: model.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)))


@bug(MODES, names="hook", has_line=False)
def global_forward_hook(on: torch.device) -> Subject:
    """A hook for all modules is registered after capture."""
    model = Net().to(on)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1)
        try:
            run(x=rows(on, 3, 2))
        finally:
            hook.remove()

    return Subject(model, calls)


@bug(MODES, names="gain")
def hook_reads_a_value(on: torch.device) -> Subject:
    """A steering hook that was there at capture adds a vector whose strength is changed later."""
    model = Net().to(on)
    steering = {"gain": 1.0}
    model.linear.register_forward_hook(lambda module, args, out: out + steering["gain"])
    return changed(model, on, lambda: steering.update(gain=4.0))
