"""The CUDA device: torch.cuda streams, events and graphs. Its phases are proven on a GPU machine by tests/gpu."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from engine.device import Device, Event, Stream, Timing, TracedForwards, Work
from engine.errors import ConfigError


class CudaTiming(Timing):
    """A pair of timing events, placed on the host clock by the device's anchor. Reading never waits.

    The pair goes back to the device once nobody holds this any more: making an event costs more than recording it.
    """

    __slots__ = ("_device", "_end", "_start")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._start, self._end = device.timing_events.pop() if device.timing_events else _timing_events()

    def __del__(self) -> None:
        self._device.timing_events.append((self._start, self._end))

    def begin(self, stream: Any) -> None:
        """Record the start."""
        self._start.record(stream)

    def end(self, stream: Any) -> None:
        """Record the end."""
        self._end.record(stream)

    def done(self) -> bool:
        return bool(self._end.query())

    def _ns(self, event: Any) -> int:
        anchor_event, anchor_ns = self._device.anchor
        return int(anchor_ns + round(anchor_event.elapsed_time(event) * 1e6))

    @property
    def start_ns(self) -> int:
        return self._ns(self._start)

    @property
    def end_ns(self) -> int:
        return self._ns(self._end)


def _timing_events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class CudaEvent(Event):
    """A CUDA event without timing."""

    __slots__ = ("_device", "event")

    def __init__(self, device: Device, event: Any) -> None:
        self._device = device
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self._device.raise_error()
        self.event.synchronize()


class CudaStream(Stream):
    """A torch.cuda stream; work runs on the host at once and enqueues there."""

    def __init__(self, name: str, device: CudaDevice) -> None:
        self.name = name
        self._device = device
        self.stream = torch.cuda.Stream(device.torch_device)

    def launch(self, work: Work, *, timed: bool = False, sleep_s: float = 0.0) -> Timing | None:
        self._device.raise_error()
        if self._device.current is self:
            return self._run(work, timed)
        with torch.cuda.stream(self.stream), torch.inference_mode():
            return self._run(work, timed)

    def _run(self, work: Work, timed: bool) -> Timing | None:
        if not timed:
            work()
            return None
        timing = CudaTiming(self._device)
        timing.begin(self.stream)
        work()
        timing.end(self.stream)
        return timing

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(self._device, event)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class _OnStream:
    """Makes a stream the current one of this thread, without gradients, for as long as it is entered."""

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        self._device = device
        self._stream = stream
        self._before: Any = None
        self._mode: Any = None

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream(self._device.torch_device)
        torch.cuda.set_stream(self._stream.stream)
        self._mode = torch.inference_mode()
        self._mode.__enter__()
        self._device.current = self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.current = None
        self._mode.__exit__(kind, error, trace)
        torch.cuda.set_stream(self._before)


class CudaDevice(Device):
    """One CUDA device. Nothing here synchronises it but the constructor, ``capture`` and ``synchronize``."""

    kind: Literal["cpu", "inline", "cuda"] = "cuda"
    graph_label: Literal["bucket", "CUDA graph"] = "CUDA graph"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' needs a CUDA GPU and a CUDA build of torch; use device='cpu' or 'inline'")
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.timing_events: list[tuple[Any, Any]] = []
        """Pairs not in use."""
        self.current: CudaStream | None = None
        """The stream that is this thread's current one, while a phase runs."""
        self.compute = CudaStream("compute", self)
        self.copy = CudaStream("copy", self)
        self._active = _OnStream(self, self.compute)
        self._pool: Any = None
        self.anchor = self._make_anchor()

    def _make_anchor(self) -> tuple[Any, int]:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.torch_device)
        before_ns = time.perf_counter_ns()
        event.record()
        event.synchronize()
        return event, (before_ns + time.perf_counter_ns()) // 2

    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def active(self) -> AbstractContextManager[None]:
        return self._active

    def zeros(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """Zeroed on the compute stream, so that launched work finds it so; reading it elsewhere needs an event."""
        assert isinstance(self.compute, CudaStream)
        with torch.cuda.stream(self.compute.stream):
            return super().zeros(shape, dtype)

    def host(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def bind_copy(self, target: Tensor, source: Tensor) -> Work:
        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return copy

    def capture(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], traced: TracedForwards
    ) -> Callable[[], Tensor]:
        assert isinstance(self.compute, CudaStream)
        stream = self.compute.stream
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(2):
                function(*inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            output = function(*inputs)
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def synchronize(self) -> None:
        self.raise_error()
        torch.cuda.synchronize(self.torch_device)
