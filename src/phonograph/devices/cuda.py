"""CUDA device: NVIDIA GPUs, and AMD's through HIP, with torch's CUDA graphs."""

from __future__ import annotations

import atexit
import ctypes
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from typing import Any
from weakref import WeakSet

import torch

from phonograph.devices.base import Capabilities, DeviceGraph, Hardware, MemoryFigures, MemoryPool, Recorder
from phonograph.devices.capturing import said_to_capture
from phonograph.devices.compiling import around_compilations
from phonograph.devices.cuda_nodes import num_captured, read_nodes
from phonograph.devices.emulated import NoGraph
from phonograph.devices.nodes import NodeList
from phonograph.devices.refused import Refused, refusing
from phonograph.devices.trace import forget_modes
from phonograph.errors import DeviceError

# Capture must not fail because of another thread's allocation or copy.
_ERROR_MODE = "thread_local"
_THREAD_LOCAL = 1
_POOL_STREAMS = 32
_POISON_BYTES = (0x3C, 0xBC)


class _Memory:
    """A stretch of device memory that another object owns, in the form that torch.as_tensor takes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaPool:
    """A torch graph pool, kept open between recordings.

    torch closes a pool with its last graph and then refuses its id, so the pool holds a small graph.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.id = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._anchor.capture_begin(pool=self.id, capture_error_mode=_ERROR_MODE)
            torch.zeros(1, device=device)
            self._anchor.capture_end()

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(s["address"] <= address < s["address"] + s["total_size"] for s in self._segments())

    def poison(self, pattern: int) -> None:
        for segment in self._segments():
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    memory = torch.as_tensor(_Memory(block["address"], block["size"]), device=self.device)
                    memory.fill_(_POISON_BYTES[pattern])

    def _segments(self) -> list[dict[str, Any]]:
        # torch 2.11 seems to release a reference to each number that it does not own: a process with more than 256
        # pools, whose ids are ordinary objects, crashes. One more reference for each call keeps them alive.
        for number in self.id:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
        segments: list[dict[str, Any]] = torch.cuda.memory.memory_snapshot(self.id)  # type: ignore[no-untyped-call]
        return segments


class CudaGraph:
    """A captured torch.cuda.CUDAGraph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool.id
        self.replay = graph.replay  # no Python frame of ours between the runner and the launch
        _live.add(self)

    def nodes(self) -> NodeList:
        """Its nodes; only for a graph that was recorded in `keeping_nodes`."""
        if self._graph is None:
            raise DeviceError("the graph was released")
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = [(one["address"], one["total_size"]) for one in segments if one["segment_pool_id"] == self._pool]
        return read_nodes(self._graph.raw_cuda_graph(), own)

    def release(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self.replay = _released


def _released() -> None:
    raise DeviceError("replaying a graph that was released. Capture it again.")


_live: WeakSet[CudaGraph] = WeakSet()


def release_all() -> None:
    """Release every graph that is alive.

    A communicator can't be destroyed while a graph holds its collectives: call this before
    `torch.distributed.destroy_process_group`. At exit it runs by itself.
    """
    for graph in list(_live):
        graph.release()


atexit.register(release_all)


class CudaFence:
    """An event on the current stream."""

    def __init__(self, device: torch.device, timed: bool) -> None:
        self._event = torch.Event(device, enable_timing=timed)
        self.record = self._event.record
        self.synchronize = self._event.synchronize

    def seconds_since(self, earlier: CudaFence) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class _CudaRecorder:
    def __init__(self, pool: CudaPool, stream: torch.cuda.Stream, *, keeps_nodes: bool) -> None:
        self._pool = pool
        self._stream = stream
        self._keeps_nodes = keeps_nodes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._forked: list[torch.cuda.Stream] = []
        self._num_ended = 0

    def num_nodes(self) -> int:
        """Of all graphs so far, with one more after each that has ended; for a recording that keeps them."""
        return self._num_ended + (num_captured(self._stream.cuda_stream) if self._graph is not None else 0)

    def begin(self) -> None:
        if self._graph is not None:
            raise DeviceError("beginning a graph while one is being recorded. End the first, or abort it.")
        graph = torch.cuda.CUDAGraph(keep_graph=True) if self._keeps_nodes else torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool.id, capture_error_mode=_ERROR_MODE)
        self._graph = graph
        for side in self._forked:
            side.wait_stream(self._stream)

    def end(self) -> DeviceGraph:
        num_nodes = self.num_nodes() + 1 if self._keeps_nodes else 0
        graph, self._graph = self._graph, None
        if graph is None:
            raise DeviceError("ending a graph that was not begun. Call begin() first.")
        try:
            self._num_ended = num_nodes
            self._forked = _capturing_streams(self._stream)
            for side in self._forked:
                self._stream.wait_stream(side)
            graph.capture_end()
        except BaseException:
            self._graph = graph
            self.abort()
            raise
        return CudaGraph(graph, self._pool)

    def abort(self) -> None:
        """End the capture; torch itself unwinds only one that is still valid.

        After an invalidated capture `capture_end` raises before it takes the allocators and the random
        generator out of capture. A second, valid capture on the same stream lets it go through.
        """
        graph, self._graph = self._graph, None
        self._forked = []
        if graph is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph may be empty
            try:
                graph.capture_end()
            except RuntimeError:
                _begin_capture(self._stream)
                graph.capture_end()
        graph.reset()


@cache
def _driver(name: str, name_in_hip: str) -> Any:
    """A function of the driver, below torch."""
    if torch.version.hip:
        return getattr(ctypes.CDLL("libamdhip64.so"), name_in_hip)
    return getattr(ctypes.CDLL("libcuda.so.1"), name)


def _begin_capture(stream: torch.cuda.Stream) -> None:
    """Begin a capture below torch."""
    begin = _driver("cuStreamBeginCapture_v2", "hipStreamBeginCapture")
    status = begin(ctypes.c_void_p(stream.cuda_stream), _THREAD_LOCAL)
    if status != 0:
        raise DeviceError(
            f"unwinding a failed capture: the driver refused with status {status}. Start the process again."
        )


@cache
def _rings(device: torch.device) -> list[torch.cuda.Stream]:
    """All streams of torch's pool for a device: two small rings, shared by all threads."""
    drawn = [
        torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        for priority in (0, -1)
        for _ in range(2 * _POOL_STREAMS)
    ]
    return list({stream.cuda_stream: stream for stream in drawn}.values())


def _capturing_streams(origin: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    """The side streams that the body has forked from the capture."""
    ask = _driver("cuStreamIsCapturing", "hipStreamIsCapturing")
    forked = []
    for stream in _rings(origin.device):
        if stream.cuda_stream != origin.cuda_stream:
            status = ctypes.c_int(0)
            ask(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status))
            if status.value:
                forked.append(stream)
    return forked


class _CudaRehearsal:
    """Makes every synchronization with the device an error between `begin` and `end`."""

    def __init__(self, named: bool) -> None:
        self._named = named
        self._modes = ExitStack()
        self._refused = Refused()

    def begin(self) -> None:
        self._refused = Refused()
        self._modes.enter_context(said_to_capture(self._refused))
        self._modes.enter_context(_waits_refused())
        if self._named:
            # Every op through Python: three times the host time of a pass.
            self._modes.enter_context(refusing("cuda", self._refused))

    def end(self) -> DeviceGraph:
        self._modes.close()
        self._refused.check()
        return NoGraph()

    def abort(self) -> None:
        self._modes.close()
        forget_modes()


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Not while torch.compile is at work: nothing of that is recorded, and a compiler reads the device as it likes."""
    before = torch.cuda.get_sync_debug_mode()

    def refuse() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")

    refuse()
    try:
        # The mode is the process's, and so is torch's count of compilations: the last to end may be another thread's.
        with around_compilations(lambda: torch.cuda.set_sync_debug_mode(before), refuse, anywhere=True):
            yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CudaDevice:
    """One GPU."""

    name = "cuda"
    capabilities = Capabilities(
        backends=frozenset({"full", "breakable", "tc_piecewise", "disabled"}),
        compilers=frozenset({"eager", "inductor"}),
    )

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "opening a CUDA device: torch finds no GPU. Check the driver and torch's build, or use device='cpu'."
            )
        count = torch.cuda.device_count()
        if index is not None and index >= count:
            raise DeviceError(f"opening cuda:{index}: torch finds {count} GPUs. Use an index below {count}.")
        self._keeps_nodes = False
        self._recorder: _CudaRecorder | None = None
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    @cached_property
    def hardware(self) -> Hardware:
        # On HIP the same call gives AMD's version: 9.4 there is not Hopper.
        generation = None if torch.version.hip else torch.cuda.get_device_capability(self.torch_device)
        return Hardware(torch.cuda.get_device_name(self.torch_device), generation)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The capture stream; made with the first recording, so that a query for the hardware takes no memory."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @contextmanager
    def keeping_nodes(self) -> Iterator[None]:
        """Inside, torch keeps the cudaGraph_t of an instantiated graph, which takes host memory."""
        before, self._keeps_nodes = self._keeps_nodes, True
        try:
            yield
        finally:
            self._keeps_nodes = before

    def new_pool(self) -> CudaPool:
        return CudaPool(self.torch_device, self._stream)

    @contextmanager
    def recorder(self, pool: MemoryPool) -> Iterator[Recorder]:
        if not isinstance(pool, CudaPool):
            raise DeviceError(
                f"recording on {self.torch_device}: the memory pool is {type(pool).__name__}, expected CudaPool. "
                "Make it with this device's new_pool()."
            )
        with self._on_capture_stream():
            recorder = self._recorder = _CudaRecorder(pool, self._stream, keeps_nodes=self._keeps_nodes)
            try:
                yield recorder
            finally:
                recorder.abort()
                self._recorder = None

    def num_nodes(self) -> int:
        """The nodes of the recording that is made now, in `keeping_nodes`."""
        return self._recorder.num_nodes() if self._recorder is not None else 0

    @contextmanager
    def rehearsal(self, *, named: bool = True) -> Iterator[Recorder]:
        # On the capture stream too: libraries keep a workspace per stream, and it must exist before capture.
        with self._on_capture_stream():
            rehearsal = _CudaRehearsal(named)
            try:
                yield rehearsal
            finally:
                rehearsal.abort()

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.torch_device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.device(self.torch_device), torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        span = _span_bytes(tensor)
        if span == 0:
            return tensor
        with torch.inference_mode(False):  # gaps write to it, whatever the mode at capture
            memory = torch.as_tensor(_Memory(tensor.data_ptr(), span), device=tensor.device)
            return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def host_block(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fence(self, *, timed: bool = False) -> CudaFence:
        return CudaFence(self.torch_device, timed)

    def seed(self, seed: int) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_unused(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryFigures(used=total - free, total=total)


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
