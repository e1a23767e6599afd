"""Floors: what the hardware allows: the matrix products of a step in one graph, and bytes over read bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from phonograph.bench.timing import device_seconds
from phonograph.devices import Device, DeviceGraph
from phonograph.engine.cache.groups import page_bytes
from phonograph.engine.models.interface import Model

_SUM_BYTES = 8 << 30


class Floors:
    """Measured on the weights of a loaded model, so that no layer's matrix is in a cache from the one before."""

    def __init__(self, device: Device, model: Model) -> None:
        self._device = device
        self._model = model
        self._gemms: dict[tuple[int, int], float] = {}
        self._bandwidth: float | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes read per second by a sum over a tensor far larger than every cache."""
        if self._bandwidth is None:
            self._bandwidth = read_bandwidth(self._device)
        return self._bandwidth

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the model: everything but the embedding table."""
        return sum(matrix.nbytes for matrix in self._model.matrices)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token of context, over all layers."""
        return page_bytes(self._model.keeps, 1, self._model.dtype)

    def gemms(self, num_rows: int, num_logit_rows: int) -> float:
        """Seconds for every matrix product of a pass over `num_rows` tokens, as torch multiplies, in one graph."""
        key = num_rows, num_logit_rows
        if key not in self._gemms:
            self._gemms[key] = self._time_gemms(num_rows, num_logit_rows)
        return self._gemms[key]

    def kv_read(self, num_tokens: float) -> float:
        """Seconds to read the keys and values of this many tokens of context once."""
        return num_tokens * self.kv_bytes_per_token / self.bandwidth

    def weights_read(self) -> float:
        """Seconds to read the weights once."""
        return self.weight_bytes / self.bandwidth

    def decode_step(self, num_seqs: int, context: float) -> float:
        """Products and keys and values of a step, one after the other."""
        return self.gemms(num_seqs, num_seqs) + self.kv_read(num_seqs * context)

    def _time_gemms(self, num_rows: int, num_logit_rows: int) -> float:
        *layers, head = self._model.matrices
        widths = {matrix.shape[1] for matrix in self._model.matrices}
        inputs = {
            (rows, width): torch.randn(rows, width, dtype=torch.float32, device=head.data.device).to(head.dtype)
            for rows in {num_rows, num_logit_rows}
            for width in widths
        }

        def products() -> None:
            for matrix in layers:
                functional.linear(inputs[num_rows, matrix.shape[1]], matrix.values())
            functional.linear(inputs[num_logit_rows, head.shape[1]], head.values())

        return device_seconds(self._device, graph_of(self._device, products).replay)


def graph_of(device: Device, body: Callable[[], None]) -> DeviceGraph:
    """One graph of what the body does."""
    with torch.inference_mode():
        with device.rehearsal(named=False) as rehearsal:
            rehearsal.begin()
            body()
            rehearsal.end()
        with device.recorder(device.new_pool()) as recorder:
            recorder.begin()
            body()
            return recorder.end()


def read_bandwidth(device: Device) -> float:
    """Bytes a second that a sum reads."""
    memory = device.memory()
    num_bytes = 16 << 20 if device.torch_device.type == "cpu" else min(_SUM_BYTES, memory.free // 4)
    with torch.inference_mode():
        numbers = torch.empty(num_bytes // 4, dtype=torch.float32, device=device.torch_device).normal_()
        return numbers.nbytes / device_seconds(device, numbers.sum)
