"""The two devices without a GPU: one runs work at launch, the other on worker threads, in order, with real times."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.device import Copy, Device, Event, Part, Stream, Timing, TracedForwards, Work
from engine.errors import DeviceError


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


def run_work(
    device: Device, work: Work, timing: HostTiming | None, sleep_s: float, kept: type[BaseException] = BaseException
) -> None:
    """Run ``work`` now, unless the device has failed; keep the first error like a sticky CUDA error.

    What is not ``kept`` is raised at once: on the caller's thread an interrupt is the caller's own.
    """
    start_ns = time.perf_counter_ns()
    if device.error is None:
        try:
            if sleep_s > 0.0:
                time.sleep(sleep_s)
            work()
        except kept as error:  # raised at the next wait, on the host's thread
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
            run_work(self._device, work, timing, sleep_s, kept=Exception)
        return timing

    def record(self) -> Event:
        event = _HostEvent(self._device)
        event.set()
        return event

    def wait_for(self, event: Event) -> None:
        assert event.done()


class InlineDevice(Device):
    """No concurrency at all: a debugger sees launched work as an ordinary call; timings show no overlap.

    Args:
        op_sleep_s: Seconds that work of a name takes longer, see :attr:`Device.op_sleep_s`.
    """

    kind: Literal["cpu", "inline", "cuda"] = "inline"
    graph_label: Literal["bucket", "CUDA graph"] = "bucket"

    def __init__(self, op_sleep_s: Mapping[str, float] | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.op_sleep_s = dict(op_sleep_s or {})
        self.compute = InlineStream("compute", self)
        self.copy = InlineStream("copy", self)

    def bind_copy(self, target: Tensor, source: Tensor, parts: Sequence[Part] = ()) -> Copy:
        return copy_keeping_the_interpreter(target, source, parts)

    def capture(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], traced: TracedForwards
    ) -> Callable[[], Tensor]:
        return bind_bucket(function, inputs, traced)


class ThreadStream(Stream):
    """A worker thread that runs launched work in order."""

    def __init__(self, name: str, device: Device, num_threads: int) -> None:
        self.name = name
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.worker = Worker(name, self._queue, num_threads)

    def launch(self, work: Work, *, timed: bool = False, sleep_s: float = 0.0) -> Timing | None:
        self._require_open()
        timing = HostTiming() if timed else None
        device, closing = self._device, self.worker.closing
        self._queue.put(lambda: None if closing.is_set() else run_work(device, work, timing, sleep_s))
        return timing

    def record(self) -> Event:
        self._require_open()
        event = _HostEvent(self._device)
        self._queue.put(event.set)
        return event

    def _require_open(self) -> None:
        """Nobody would ever run what is queued behind the worker's end, and a wait for it would never return."""
        if self._device.is_closed:
            raise DeviceError(f"the {self._device.kind} device is closed")

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _HostEvent)
        self._queue.put(event.block)


class Worker:
    """The thread of one stream; knows nothing of the device, so that a forgotten device can be collected."""

    STOP_S = 10.0

    def __init__(self, name: str, work_queue: queue.SimpleQueue[Callable[[], None] | None], num_threads: int) -> None:
        self.closing = threading.Event()
        """Work that has not begun is skipped; events are still set, so that nobody waits for ever."""
        self._queue = work_queue
        self._thread = threading.Thread(
            target=_drain_queue, args=(work_queue, num_threads), name=f"device-{name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the work in hand."""
        self.closing.set()
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the end, at most ``STOP_S`` seconds.

        A thread that is inside torch while the interpreter goes away takes the process down with it.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(self.STOP_S)


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

    Args:
        op_sleep_s: Seconds that work of a name takes longer, see :attr:`Device.op_sleep_s`.
    """

    kind: Literal["cpu", "inline", "cuda"] = "cpu"
    graph_label: Literal["bucket", "CUDA graph"] = "bucket"

    def __init__(self, op_sleep_s: Mapping[str, float] | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.op_sleep_s = dict(op_sleep_s or {})
        num_threads = max(1, (os.cpu_count() or 2) - 1)
        compute = ThreadStream("compute", self, num_threads)
        copy = ThreadStream("copy", self, 1)
        self.compute = compute
        self.copy = copy
        _SwitchInterval.acquire()
        self._finalizer = weakref.finalize(self, _stop_workers, compute.worker, copy.worker)

    def bind_copy(self, target: Tensor, source: Tensor, parts: Sequence[Part] = ()) -> Copy:
        return copy_keeping_the_interpreter(target, source, parts)

    def capture(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], traced: TracedForwards
    ) -> Callable[[], Tensor]:
        made: list[Callable[[], Tensor]] = []
        self.compute.launch(lambda: made.append(bind_bucket(function, inputs, traced)))
        self.compute.record().wait()
        return made[0]

    def close(self) -> None:
        self.is_closed = True
        self._finalizer()


def _stop_workers(*workers: Worker) -> None:
    """Also run when the interpreter ends, with whatever is still queued."""
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join()
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


def copy_keeping_the_interpreter(target: Tensor, source: Tensor, parts: Sequence[Part] = ()) -> Copy:
    """A copy of a few microseconds that does not let go of the interpreter.

    Beside a busy scheduler a worker that lets go gets the interpreter back only when the host waits: the host takes it
    again after each of its own short releases, before the worker has woken. Torch lets go in every operation and when
    a tensor made by ``numpy()`` dies, numpy in copies of more than 500 elements; copying between two memory views
    does not, and the views are made once.
    """
    into, out_of = target.numpy().data.cast("B"), source.numpy().data.cast("B")
    begins = [range(part.offset, part.offset + part.num_fields * part.stride, part.stride) for part in parts]

    def copy(*counts: int) -> None:
        if not counts:
            into[:] = out_of
            return
        for places, count in zip(begins, counts, strict=True):
            for begin in places:
                taken = slice(begin, begin + 8 * count)
                into[taken] = out_of[taken]

    return copy


class _Traced(torch.nn.Module):
    """Wraps a function so that freezing has a module to work on."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


TRACE_WARMUPS = 3
"""Runs after tracing: the profiling executor specialises in the first two."""


def bind_bucket(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], traced: TracedForwards
) -> Callable[[], Tensor]:
    """A call that runs the bucket of ``function`` on ``inputs``, traced unless one of the same shapes is there."""
    described = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in inputs)
    key = (getattr(function, "key", function), described)
    if key not in traced:
        traced[key] = trace_bucket(function, inputs)
    bucket = traced[key]
    return lambda: bucket(*inputs)


def trace_bucket(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Trace and freeze ``function`` for the shapes of ``inputs``; the CPU's stand-in for a CUDA graph.

    A frozen trace leaves the interpreter alone while it runs, so the scheduler's thread goes on beside it.
    Weights are folded in as constants: a bucket is void once they change.
    """
    module = _Traced(function).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is deprecated upstream, and warns of every Python integer
        traced: Callable[..., Tensor] = torch.jit.freeze(torch.jit.trace(module, inputs, check_trace=False))
    for _ in range(TRACE_WARMUPS):
        traced(*inputs)
    return traced
