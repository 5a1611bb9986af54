"""Streams, events, host buffers and graphs of three devices behind one small interface.

Work is a function without arguments that is *launched* on a stream. ``inline`` runs it at once on the caller's
thread; ``cpu`` hands it to the stream's worker thread, which runs its work in order; ``cuda`` runs it at once under
the CUDA stream, so that what it enqueues is ordered there. On all three, results may be read by the host only after
an event recorded behind the work is done, and functions must not wait for anything themselves.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import DeviceError

Work = Callable[[], object]
"""What is launched; what it returns is dropped."""
TracedForwards = MutableMapping[Hashable, Callable[..., Tensor]]


class Part(NamedTuple):
    """Equal fields of 8-byte elements within a slab, of which a copy takes no more than the beginnings."""

    offset: int
    """Bytes before the first one."""
    stride: int
    """Bytes from one to the next."""
    num_fields: int


class Copy(Protocol):
    """A bound copy; see :meth:`Device.bind_copy`."""

    def __call__(self, *counts: int) -> object:
        """Enqueue it, of each part so many elements of each field; of everything without counts."""
        ...


@cache
def has_triton() -> bool:
    """Whether kernels of our own can be had: CUDA devices copy with one, and make decode forwards' inputs."""
    return find_spec("triton") is not None


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
        """Enqueue ``work``; returns its timing if ``timed``.

        Args:
            work: What to run in stream order.
            timed: Whether to take its times.
            sleep_s: Delays it on the CPU devices.
        """

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
        self.is_closed = False
        self.op_sleep_s: Mapping[str, float] = {}
        """CPU devices: seconds each piece of work of a name (publish, forward, sample, fetch, compact) takes longer."""

    def host(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """A zeroed host tensor that asynchronous copies may use (pinned where that means something)."""
        return torch.zeros(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """A zeroed device tensor."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    @abstractmethod
    def bind_copy(self, target: Tensor, source: Tensor, parts: Sequence[Part] = ()) -> Copy:
        """A copy of a host tensor of :meth:`host` to a device tensor of the same layout; to be called in launched work.

        Bound once, so that a step's copy makes no tensor and no view.

        Args:
            target: [bytes] uint8, a multiple of 8.
            source: The same.
            parts: Of which calls count the elements: three, or none at all.
        """

    @abstractmethod
    def capture(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], traced: TracedForwards
    ) -> Callable[[], Tensor]:
        """Make a graph of ``function(*inputs)`` with these very input tensors; blocks the host.

        ``function`` is run a few times, so what it writes must be harmless. The returned call replays the graph on
        the current contents of the inputs and returns the output (the same tensor every time on CUDA). Call it
        inside launched work only. The CPU devices look in ``traced`` for a forward of the same shapes first and leave
        theirs there, since a trace's memory is never given back by torch.
        """

    def memory_bytes(self) -> int:
        """Memory of the machine that holds this device's tensors, in use or not."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def used_bytes(self) -> int:
        """Memory in use now: of this process on the CPU devices, of the whole GPU on CUDA. 0 where nothing tells."""
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        except OSError:
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def give_memory_back(self) -> None:  # noqa: B027 - the CPU devices keep nothing of what nobody uses
        """Return memory that nobody uses any more to the machine; later captures share none with earlier ones.

        To be called with nothing in flight.
        """

    def keep_time(self) -> None:  # noqa: B027 - the CPU devices stamp times on the host's own clock
        """Called between iterations, so that times of the device stay true on the host's clock. Never waits."""

    @property
    def clock_error_ns(self) -> int | None:
        """Bound on how far the device times read so far are off the host's clock; None where they are taken on it."""
        return None

    def active(self) -> AbstractContextManager[None]:
        """Entered around each phase: work launched on the compute stream then costs the host less. May be nothing."""
        return nullcontext()

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

    def close(self) -> None:  # noqa: B027 - only the thread device has something to stop
        """Stop worker threads. The device cannot be used afterwards."""


def make_device(kind: str) -> Device:
    """The device an :class:`~engine.config.EngineConfig` names."""
    if kind == "cuda":
        from engine.device_cuda import CudaDevice

        return CudaDevice()
    from engine.device_host import InlineDevice, ThreadDevice

    return ThreadDevice() if kind == "cpu" else InlineDevice()
