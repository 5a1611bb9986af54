"""The CUDA device: torch.cuda streams, events and graphs. Its phases are proven on a GPU machine by tests/gpu."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from engine.device import Copy, Device, Event, Part, Stream, Timing, TracedForwards, Work, has_triton
from engine.device_clock import EventClock
from engine.errors import ConfigError

BEFORE_RETURN_NS = 10_000
"""How long before a launch returns an idle device begins with it: 9 to 14 µs for graphs on the H200 machine, where
launching takes longer than that (docs/metrics.md); half of a launch that is shorter. A kernel begins as it returns."""


LONGEST_LAUNCH_NS = 5_000_000
"""What is longer was no launch: the thread waited for the interpreter, which another thread keeps for at least this
long (``sys.getswitchinterval``), maybe after the launch. Launches under a profiler take up to 2.3 ms."""


class CudaMark:
    """A timing event, recorded on a stream at once, and the anchor that places it on the host clock.

    The event goes back to the device once nobody holds this any more: making one costs more than recording it.
    """

    __slots__ = ("_device", "anchor", "event")

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device = device
        self.anchor = device.clock.anchor
        self.event: Any = device.timing_event()
        self.event.record(stream)

    def __del__(self) -> None:
        self._device.timing_events.append(self.event)

    @property
    def ns(self) -> int:
        """When it passed, which it must have."""
        return self._device.clock.place(self.anchor, self.event)


class CudaTiming(Timing):
    """Two marks. Reading never waits.

    The first one may be the end of what was enqueued before; or it passes on an idle device as soon as it is recorded,
    while the host still launches the work behind it. So a start lies no earlier than the first launch, or where that is
    not known, than the moment at which the host began. Both are placed by one anchor, so that a length is right however
    far the anchors differ.
    """

    __slots__ = ("_end", "_not_before_ns", "_start")

    def __init__(self, start: CudaMark, end: CudaMark, not_before_ns: int) -> None:
        self._start, self._end, self._not_before_ns = start, end, not_before_ns

    def done(self) -> bool:
        return bool(self._end.event.query())

    @property
    def start_ns(self) -> int:
        return max(self._not_before_ns, self._start.ns)

    @property
    def end_ns(self) -> int:
        return max(self._not_before_ns, self._end.ns)


class CudaEvent(Event):
    """A CUDA event, one of its own without timing or that of a mark, which is kept from being used anew."""

    __slots__ = ("_device", "_mark", "event")

    def __init__(self, device: Device, event: Any, mark: CudaMark | None = None) -> None:
        self._device = device
        self._mark = mark
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
        self._entered = _OnStream(device, self)
        self._newest: CudaMark | None = None
        """Behind what was enqueued last, if that was timed."""

    def launch(self, work: Work, *, timed: bool = False, sleep_s: float = 0.0) -> Timing | None:
        device = self._device
        device.raise_error()
        if device.current is self:
            return self._run(work, timed)
        with self._entered:
            return self._run(work, timed)

    def _run(self, work: Work, timed: bool) -> Timing | None:
        device, start = self._device, self._newest
        self._newest = None
        if not timed:
            work()
            return None
        if start is None or start.anchor is not device.clock.anchor:
            start = CudaMark(device, self.stream)
        begin_ns, device.first_launch_ns = time.perf_counter_ns(), None
        work()
        self._newest = end = CudaMark(device, self.stream)
        return CudaTiming(start, end, device.first_launch_ns or begin_ns)

    def record(self) -> Event:
        if self._newest is not None:
            return CudaEvent(self._device, self._newest.event, self._newest)
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(self._device, event)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._newest = None
        self.stream.wait_event(event.event)


class _OnStream:
    """Makes a stream the current one of this thread, without gradients, for as long as it is entered.

    A few microseconds where ``torch.cuda.stream`` takes twenty: a phase enters it several times a step.
    """

    __slots__ = ("_before", "_device", "_guard", "_outer", "_stream")

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        self._device = device
        self._stream = stream
        self._before: Any = None
        self._outer: CudaStream | None = None
        self._guard: Any = None

    def __enter__(self) -> None:
        device = self._device
        self._outer = device.current
        if self._outer is None:
            self._before = device.users_stream()
            self._guard = torch.inference_mode()
            self._guard.__enter__()
        else:
            self._before = self._outer.stream
        torch.cuda.set_stream(self._stream.stream)
        device.current = self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.current = self._outer
        torch.cuda.set_stream(self._before)
        if self._outer is None:
            self._guard.__exit__(kind, error, trace)


class _Active:
    """Entered around an iteration, and again around each phase of it, which then costs next to nothing."""

    __slots__ = ("_depth", "_device", "_on_stream")

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        self._device = device
        self._on_stream = _OnStream(device, stream)
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._on_stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._on_stream.__exit__(kind, error, trace)


class CudaDevice(Device):
    """One CUDA device. Nothing here synchronises it but the constructor, ``capture`` and ``synchronize``."""

    kind: Literal["cpu", "inline", "cuda"] = "cuda"
    graph_label: Literal["bucket", "CUDA graph"] = "CUDA graph"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' needs a CUDA GPU and a CUDA build of torch; use device='cpu' or 'inline'")
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.timing_events: list[Any] = []
        """Not in use."""
        self.first_launch_ns: int | None = None
        """When the first launch of the work in hand reached the device, as near as the host can tell."""
        self.current: CudaStream | None = None
        """The stream that is this thread's current one, while a phase runs."""
        self.compute = CudaStream("compute", self)
        self.copy = CudaStream("copy", self)
        self._active = _Active(self, self.compute)
        self._users_stream: tuple[Any, Any] = (None, None)
        self._pool: Any = None
        torch.cuda.synchronize(self.torch_device)
        self._clock_stream = torch.cuda.Stream(self.torch_device)
        self.clock = EventClock(self._record_anchor)

    def timing_event(self) -> Any:
        """One not in use."""
        return self.timing_events.pop() if self.timing_events else torch.cuda.Event(enable_timing=True)

    def _record_anchor(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._clock_stream)
        return event

    def keep_time(self) -> None:
        self.clock.keep()

    @property
    def clock_error_ns(self) -> int | None:
        return self.clock.error_ns

    def users_stream(self) -> Any:
        """The current stream of this thread; made into an object anew only where it has changed."""
        raw = torch._C._cuda_getCurrentStream(self.torch_device.index)
        if raw != self._users_stream[0]:
            self._users_stream = (raw, torch.cuda.current_stream(self.torch_device))
        return self._users_stream[1]

    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    def give_memory_back(self) -> None:
        self._pool = None  # its graphs may be gone, and torch refuses a capture into a pool that has none
        gc.collect()
        torch.cuda.empty_cache()

    def active(self) -> AbstractContextManager[None]:
        return self._active

    def zeros(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """Zeroed on the compute stream, so that launched work finds it so; reading it elsewhere needs an event."""
        assert isinstance(self.compute, CudaStream)
        with torch.cuda.stream(self.compute.stream):
            return super().zeros(shape, dtype)

    def host(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def bind_copy(self, target: Tensor, source: Tensor, parts: Sequence[Part] = ()) -> Copy:
        """By a kernel where Triton is there: an engine for copies makes the kernels around it wait."""
        assert isinstance(self.compute, CudaStream)
        upload = _bound_upload(target, source, parts) if has_triton() else None
        with torch.cuda.stream(self.compute.stream):
            # Once as torch does it: so it knows that freed memory may still be read on this stream.
            target.copy_(source, non_blocking=True)

        def copy(*counts: int) -> None:
            called_ns = time.perf_counter_ns()
            if upload is None:
                target.copy_(source, non_blocking=True)
                self._note_launch(called_ns)
            else:
                upload(*counts)
                self._note_launch(called_ns, before_return_ns=0)

        return copy

    def capture(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], traced: TracedForwards
    ) -> Callable[[], Tensor]:
        with _no_collection():
            return self._capture(function, inputs)

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
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
            called_ns = time.perf_counter_ns()
            graph.replay()
            self._note_launch(called_ns)
            return output

        return replay

    def _note_launch(self, called_ns: int, before_return_ns: int = BEFORE_RETURN_NS) -> None:
        if self.first_launch_ns is None:
            returned_ns = time.perf_counter_ns()
            began_ns = returned_ns - min(before_return_ns, (returned_ns - called_ns) // 2)
            self.first_launch_ns = min(began_ns, called_ns + LONGEST_LAUNCH_NS)

    def synchronize(self) -> None:
        self.raise_error()
        torch.cuda.synchronize(self.torch_device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave garbage alone meanwhile.

    Freeing the pinned memory of an engine that is gone may record an event on this one's stream, for torch has 32 of
    them, and ask for it, which would end a capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _bound_upload(target: Tensor, source: Tensor, parts: Sequence[Part]) -> Copy:
    from engine.kernels.triton_upload import bind_upload

    words = source.view(torch.int64), target.view(torch.int64)
    size, nothing = words[0].numel(), (0, 0, 0)
    whole = (0, size, 1), nothing, nothing
    in_words = [(part.offset // 8, part.stride // 8, part.num_fields) for part in parts]
    upload = bind_upload(*words)

    def enqueue(*counts: int) -> None:
        if counts:
            upload(in_words, counts)
        else:
            upload(whole, (size, 0, 0))

    return enqueue
