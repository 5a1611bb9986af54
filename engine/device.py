"""Streams, events, host buffers and graphs of three devices behind one small interface.

Work is a function without arguments that is *launched* on a stream. ``inline`` runs it at once on the caller's
thread; ``cpu`` hands it to the stream's worker thread, which runs its work in order; ``cuda`` runs it at once under
the CUDA stream, so that what it enqueues is ordered there. On all three, results may be read by the host only after
an event recorded behind the work is done, and functions must not wait for anything themselves.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from engine.errors import ConfigError, DeviceError

Work = Callable[[], None]


class Timing(ABC):
    """When one piece of work ran, on the clock of ``time.perf_counter_ns``; valid once ``done``."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work has ended. Never blocks."""

    @property
    @abstractmethod
    def start_ns(self) -> int: ...

    @property
    @abstractmethod
    def end_ns(self) -> int: ...


class Event(ABC):
    """A point in a stream's order."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before it has run. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until done.

        Raises:
            DeviceError: work on the device raised; the cause is chained.
        """


class Stream(ABC):
    """Work of one stream runs in launch order."""

    name: str

    @abstractmethod
    def launch(self, work: Work, *, timed: bool = False, sleep_s: float = 0.0) -> Timing | None:
        """Enqueue ``work``; returns its timing if ``timed``. ``sleep_s`` delays it on the CPU devices."""

    @abstractmethod
    def record(self) -> Event:
        """An event behind all work launched so far."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Later work of this stream runs after ``event``; the host does not wait."""


class Device(ABC):
    """One accelerator, or what stands in for it: a compute stream, a copy stream, and memory."""

    kind: Literal["cpu", "inline", "cuda"]
    compute: Stream
    copy: Stream
    graph_label: Literal["bucket", "CUDA graph"]

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.error: BaseException | None = None

    def host(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """A zeroed host tensor that asynchronous copies may use (pinned where that means something)."""
        return torch.zeros(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """A zeroed device tensor."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    @abstractmethod
    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Make a graph of ``function(*inputs)`` with these very input tensors; blocks the host.

        ``function`` is run a few times, so what it writes must be harmless. The returned call replays the graph on
        the current contents of the inputs and returns the output (the same tensor every time on CUDA). Call it
        inside launched work only.
        """

    def synchronize(self) -> None:
        """Block until both streams are idle. For tests, capture and recovery; the phases never call it.

        Raises:
            DeviceError: work on the device raised.
        """
        self.compute.record().wait()
        self.copy.record().wait()

    def clear_error(self) -> None:
        """Let streams run again after a failure; the device must be idle or drained of failed work."""
        self.error = None

    def raise_error(self) -> None:
        """Raise the first error of launched work, if any."""
        if self.error is not None:
            raise DeviceError(f"work on the {self.kind} device failed: {self.error}") from self.error

    def close(self) -> None:
        """Stop worker threads. The device cannot be used afterwards."""


class HostTiming(Timing):
    """Times stamped by the thread that ran the work."""

    __slots__ = ("_end_ns", "_start_ns")

    def __init__(self) -> None:
        self._start_ns = 0
        self._end_ns = 0

    def done(self) -> bool:
        return self._end_ns != 0

    @property
    def start_ns(self) -> int:
        return self._start_ns

    @property
    def end_ns(self) -> int:
        return self._end_ns


class _HostEvent(Event):
    __slots__ = ("_device", "_flag")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flag = threading.Event()

    def done(self) -> bool:
        return self._flag.is_set()

    def wait(self) -> None:
        self._flag.wait()
        self._device.raise_error()

    def set(self) -> None:
        self._flag.set()

    def block(self) -> None:
        """Wait without raising, for worker threads."""
        self._flag.wait()


def run_work(device: Device, work: Work, timing: HostTiming | None, sleep_s: float) -> None:
    """Run ``work`` now, unless the device has failed; keep the first error like a sticky CUDA error."""
    start_ns = time.perf_counter_ns()
    if device.error is None:
        try:
            if sleep_s > 0.0:
                time.sleep(sleep_s)
            work()
        except BaseException as error:  # kept and raised at the next wait, on the host's thread
            device.error = error
    if timing is not None:
        timing._start_ns = start_ns
        timing._end_ns = max(time.perf_counter_ns(), start_ns + 1)


class InlineStream(Stream):
    """Runs work at launch on the caller's thread."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device

    def launch(self, work: Work, *, timed: bool = False, sleep_s: float = 0.0) -> Timing | None:
        timing = HostTiming() if timed else None
        with torch.inference_mode():
            run_work(self._device, work, timing, sleep_s)
        return timing

    def record(self) -> Event:
        event = _HostEvent(self._device)
        event.set()
        return event

    def wait_for(self, event: Event) -> None:
        assert event.done()


class InlineDevice(Device):
    """No concurrency at all: a debugger sees launched work as an ordinary call; timings show no overlap."""

    kind: Literal["cpu", "inline", "cuda"] = "inline"
    graph_label: Literal["bucket", "CUDA graph"] = "bucket"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.compute = InlineStream("compute", self)
        self.copy = InlineStream("copy", self)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        return trace_bucket(function, inputs)


class ThreadStream(Stream):
    """A worker thread that runs launched work in order."""

    def __init__(self, name: str, device: Device, num_threads: int) -> None:
        self.name = name
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_drain_queue, args=(self._queue, num_threads), name=f"device-{name}", daemon=True
        )
        self._thread.start()

    def launch(self, work: Work, *, timed: bool = False, sleep_s: float = 0.0) -> Timing | None:
        timing = HostTiming() if timed else None
        device = self._device
        self._queue.put(lambda: run_work(device, work, timing, sleep_s))
        return timing

    def record(self) -> Event:
        event = _HostEvent(self._device)
        self._queue.put(event.set)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _HostEvent)
        self._queue.put(event.block)

    def stop(self) -> None:
        self._queue.put(None)


def _drain_queue(work_queue: queue.SimpleQueue[Callable[[], None] | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        while (work := work_queue.get()) is not None:
            work()
            del work  # a waiting worker must not keep the last batch's tensors alive


class ThreadDevice(Device):
    """Two worker threads as streams: real overlap on two cores without a GPU.

    While at least one lives, Python's switch interval is 0.1 ms: with the default 5 ms the worker waits that long for
    the interpreter each time the scheduler does not let go, and nothing overlaps.
    """

    kind: Literal["cpu", "inline", "cuda"] = "cpu"
    graph_label: Literal["bucket", "CUDA graph"] = "bucket"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        num_threads = max(1, (os.cpu_count() or 2) - 1)
        compute = ThreadStream("compute", self, num_threads)
        copy = ThreadStream("copy", self, 1)
        self.compute = compute
        self.copy = copy
        _SwitchInterval.acquire()
        self._finalizer = weakref.finalize(self, _stop_streams, compute._queue, copy._queue)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        made: list[Callable[[], Tensor]] = []
        self.compute.launch(lambda: made.append(trace_bucket(function, inputs)))
        self.compute.record().wait()
        return made[0]

    def close(self) -> None:
        self._finalizer()


def _stop_streams(*queues: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    for work_queue in queues:
        work_queue.put(None)
    _SwitchInterval.release()


class _SwitchInterval:
    """Counts the thread devices alive; the interpreter has one switch interval for all of them."""

    _lock = threading.Lock()
    _users = 0
    _before = 0.005
    WHILE_RUNNING_S = 1e-4

    @classmethod
    def acquire(cls) -> None:
        with cls._lock:
            if cls._users == 0:
                cls._before = sys.getswitchinterval()
                sys.setswitchinterval(cls.WHILE_RUNNING_S)
            cls._users += 1

    @classmethod
    def release(cls) -> None:
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                sys.setswitchinterval(cls._before)


class _Traced(torch.nn.Module):
    """Wraps a function so that freezing has a module to work on."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


TRACE_WARMUPS = 3
"""Runs after tracing: the profiling executor specialises in the first two."""


def trace_bucket(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """Trace and freeze ``function`` for the shapes of ``inputs``; the CPU's stand-in for a CUDA graph.

    A frozen trace leaves the interpreter alone while it runs, so the scheduler's thread goes on beside it.
    Weights are folded in as constants: a bucket is void once they change.
    """
    import warnings

    module = _Traced(function).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is deprecated upstream, and warns of every Python integer
        traced = torch.jit.freeze(torch.jit.trace(module, inputs, check_trace=False))
    for _ in range(TRACE_WARMUPS):
        traced(*inputs)
    return lambda: traced(*inputs)  # type: ignore[no-any-return]


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
        return anchor_ns + round(anchor_event.elapsed_time(event) * 1e6)

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

    def host(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
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


def make_device(kind: str) -> Device:
    """The device an :class:`~engine.config.EngineConfig` names."""
    if kind == "cuda":
        return CudaDevice()
    return ThreadDevice() if kind == "cpu" else InlineDevice()
