"""The stretch that an attached profiler is to record: an NVTX range, and the profiler calls of the CUDA runtime."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from tracing.nvtx_ranges import Attributes, RangeSink


class CaptureRange:
    """Opens on entry, closes on exit, and can be used again afterwards.

    The NVTX range lies inside the CUDA profiler's stretch, so that a tool that waits for either records it.
    """

    def __init__(self, sink: RangeSink, attributes: Attributes, payload: int) -> None:
        self._sink = sink
        self._attributes = attributes
        self._payload = payload
        self._token: Any = None
        self._profiler: Any = None

    def __enter__(self) -> None:
        self._profiler = _cuda_profiler()
        if self._profiler is not None:
            self._profiler.start()
        if self._attributes is not None:
            self._token = self._sink.start(self._attributes, self._payload)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attributes is not None:
            self._sink.end(self._token)
        if self._profiler is not None:
            self._profiler.stop()


def _cuda_profiler() -> Any:
    """``torch.cuda.profiler`` in a process that uses CUDA already; None in any other."""
    torch = sys.modules.get("torch")
    return torch.cuda.profiler if torch is not None and torch.cuda.is_initialized() else None
