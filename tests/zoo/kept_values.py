"""Bugs of values that are read by a way round: kept methods and getters, arrays, enums, loggers, tensors' own flags."""

from __future__ import annotations

import array
import enum
import logging
import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.animals import WIDTH, Mechanism, Subject, calling
from zoo.judge import bug
from zoo.modes import under
from zoo.python_values import changed

VALUES, MODES = Mechanism.VALUES, Mechanism.MODES


@bug(VALUES, names="'s'")
def method_of_a_table_kept(on: torch.device) -> Subject:
    """`get = table.get` is kept for speed, and an entry is changed."""
    table = {"s": 2.0}
    get = table.get
    return changed(lambda x: x * (get("s") or 1.0), on, lambda: table.update(s=9.0))


@bug(VALUES, names="table")
def table_behind_map(on: torch.device) -> Subject:
    """A table is asked through map, and an entry is changed."""
    table = {"s": 2.0, "t": 1.0}
    return changed(lambda x: x * sum(map(table.__getitem__, ("s", "t"))), on, lambda: table.update(s=9.0))


@bug(VALUES, names="scale")
def getter_of_a_config_kept(on: torch.device) -> Subject:
    """A module-wide attrgetter reads a config, which is changed."""
    config, get = SimpleNamespace(model=SimpleNamespace(scale=2.0)), operator.attrgetter("model.scale")
    return changed(lambda x: x * get(config), on, lambda: setattr(config.model, "scale", 9.0))


@bug(VALUES, names="names")
def names_joined(on: torch.device) -> Subject:
    """The length of a joined list of names is a factor, and a name is added."""
    names = ["q", "k"]
    return changed(lambda x: x * len("".join(names)), on, lambda: names.append("v"))


@bug(VALUES, names="config")
def config_of_eight_levels(on: torch.device) -> Subject:
    """A deep config is hashed as text, and its innermost value is changed."""
    inner: dict[str, Any] = {"v": 2}
    config: Any = inner
    for _ in range(8):
        config = {"below": config}
    return changed(lambda x: x * (len(str(config)) % 7), on, lambda: inner.update(v=99999))


@bug(VALUES, names="scales")
def scales_in_an_array(on: torch.device) -> Subject:
    """Scales lie in an array.array, and one is changed."""
    scales = array.array("f", [2.0, 3.0])
    return changed(lambda x: x * scales[1], on, lambda: operator.setitem(scales, 1, 9.0))


@bug(VALUES, names="records")
def scales_in_records(on: torch.device) -> Subject:
    """Scales lie in a structured array, and one is changed."""
    records: Any = np.zeros(2, dtype=[("scale", "f4"), ("zero", "i4")])
    records["scale"] = 2
    return changed(lambda x: x * float(records["scale"][1]), on, lambda: operator.setitem(records["scale"], 1, 9))


class Block:
    def __init__(self) -> None:
        self.scale = 2.0


@bug(VALUES, names="scale")
def objects_in_an_array(on: torch.device) -> Subject:
    """Objects of a class lie in an array of objects, and an attribute of one is changed."""
    blocks = np.array([Block(), Block()], dtype=object)
    return changed(lambda x: x * blocks[1].scale, on, lambda: setattr(blocks[1], "scale", 9.0))


@bug(VALUES, names="value")
def table_of_an_enum(on: torch.device) -> Subject:
    """The value of an enum's member is a list, and an item is changed."""

    class Scales(enum.Enum):
        LINEAR = [2.0]  # noqa: RUF012

    return changed(lambda x: x * Scales.LINEAR.value[0], on, lambda: operator.setitem(Scales.LINEAR.value, 0, 9.0))


@bug(VALUES, names="level")
def level_of_a_logger(on: torch.device) -> Subject:
    """With debug logging on, the body clamps what it would log; the level is changed."""
    logger = logging.getLogger("zoo.level_of_a_logger")
    logger.setLevel(logging.WARNING)

    def step(x: Tensor) -> Tensor:
        return x.clamp(max=0) if logger.isEnabledFor(logging.DEBUG) else x * 2

    return changed(step, on, lambda: logger.setLevel(logging.DEBUG), lambda: logger.setLevel(logging.WARNING))


@bug(VALUES, names="packed", kills_gpu=True)
def packed_weights_loaded(on: torch.device) -> Subject:
    """A quantised layer is given the weights of another: they are packed in C++, and no parameters."""
    torch.backends.quantized.engine = next(one for one in torch.backends.quantized.supported_engines if one != "none")
    one, other = (
        torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(WIDTH, WIDTH)), {nn.Linear}) for _ in range(2)
    )
    return changed(calling(one), on, lambda: one.load_state_dict(other.state_dict()))


@bug(VALUES, names="_version")
def cache_by_version(on: torch.device) -> Subject:
    """A fused weight is made anew when the weight's version moves, and the weight is written in place."""
    weight = torch.ones(WIDTH, device=on)
    cache: dict[str, Any] = {"version": weight._version, "fused": weight * 2}

    def step(x: Tensor) -> Tensor:
        if weight._version != cache["version"]:
            cache.update(version=weight._version, fused=weight * 2)
        return x * cache["fused"]

    return changed(step, on, lambda: weight.fill_(9.0))


@bug(VALUES, names="requires_grad")
def frozen_layer(on: torch.device) -> Subject:
    """A layer that is trained is scaled, and is frozen after capture."""
    model = nn.Linear(WIDTH, WIDTH).to(on)
    return changed(
        lambda x: model(x) * 2 if model.weight.requires_grad else model(x), on, lambda: model.requires_grad_(False)
    )


@bug(VALUES, names="grad")
def gradient_replaced(on: torch.device) -> Subject:
    """The body steps along a gradient, which the next backward pass replaces."""
    weight = torch.ones(WIDTH, device=on, requires_grad=True)
    weight.grad = torch.ones(WIDTH, device=on)
    return changed(lambda x: x - weight.grad, on, lambda: setattr(weight, "grad", torch.full((WIDTH,), 9.0, device=on)))


class Halved(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is nn.functional.relu else found


@bug(MODES, names="modes of torch.overrides", has_line=False)
def function_mode_entered(on: torch.device) -> Subject:
    """Calls are made inside a TorchFunctionMode that changes an op."""
    return under(lambda x: nn.functional.relu(x) * 2, on, Halved)


@bug(MODES, names="is_inference_mode_enabled")
def inference_mode_asked_for(on: torch.device) -> Subject:
    """The body branches on inference mode, which is entered after capture."""
    return under(lambda x: x * 2 if torch.is_inference_mode_enabled() else x, on, torch.inference_mode)


@bug(MODES, names="get_fastpath_enabled")
def fast_path_turned_off(on: torch.device) -> Subject:
    """The body branches on the switch for attention's fast path, as torch's own layers do."""
    torch.backends.mha.set_fastpath_enabled(True)
    return changed(
        lambda x: x * 2 if torch.backends.mha.get_fastpath_enabled() else x,
        on,
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        lambda: torch.backends.mha.set_fastpath_enabled(True),
    )
