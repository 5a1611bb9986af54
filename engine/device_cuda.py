"""The CUDA device: torch.cuda streams, events and graphs. Its phases are proven on a GPU machine by tests/gpu."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from engine.device import Device, Event, Stream, Timing, TracedForwards, Work
from engine.errors import ConfigError


class CudaTiming(Timing):
    """A pair of timing events, placed on the host clock by the device's anchor. Reading never waits."""

    def __init__(self, anchor: tuple[Any, int], start: Any, end: Any) -> None:
        self._anchor = anchor
        self._start = start
        self._end = end

    def done(self) -> bool:
        return bool(self._end.query())

    def _ns(self, event: Any) -> int:
        anchor_event, anchor_ns = self._anchor
        return int(anchor_ns + round(anchor_event.elapsed_time(event) * 1e6))

    @property
    def start_ns(self) -> int:
        return self._ns(self._start)

    @property
    def end_ns(self) -> int:
        return self._ns(self._end)


class CudaEvent(Event):
    """A CUDA event without timing."""

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
        with torch.cuda.stream(self.stream), torch.inference_mode():
            if not timed:
                work()
                return None
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(self.stream)
            work()
            end.record(self.stream)
        return CudaTiming(self._device.anchor, start, end)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(self._device, event)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice(Device):
    """One CUDA device. Nothing here synchronises it but the constructor, ``capture`` and ``synchronize``."""

    kind: Literal["cpu", "inline", "cuda"] = "cuda"
    graph_label: Literal["bucket", "CUDA graph"] = "CUDA graph"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' needs a CUDA GPU and a CUDA build of torch; use device='cpu' or 'inline'")
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.compute = CudaStream("compute", self)
        self.copy = CudaStream("copy", self)
        self._pool: Any = None
        self.anchor = self._make_anchor()

    def _make_anchor(self) -> tuple[Any, int]:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.torch_device)
        before_ns = time.perf_counter_ns()
        event.record()
        event.synchronize()
        return event, (before_ns + time.perf_counter_ns()) // 2

    def zeros(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """Zeroed on the compute stream, so that launched work finds it so; reading it elsewhere needs an event."""
        assert isinstance(self.compute, CudaStream)
        with torch.cuda.stream(self.compute.stream):
            return super().zeros(shape, dtype)

    def host(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

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
