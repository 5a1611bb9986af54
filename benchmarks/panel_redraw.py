"""What one redraw of a panel costs Python, pane by pane, with everything packed for the browser as a kernel does it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from workbench.session import Session

_REPEATS = 20
_ROWS = 64


def measure_redraws(iterations: int) -> dict[str, dict[str, float]]:
    """At 64 live rows behind so many iterations: milliseconds of the view, of the redraw, and kilobytes sent."""
    sent = _PackedMessages()
    session = _long_session(iterations)
    panel = session.panel()
    results = {"stamp": {"µs": 1e3 * _median_ms(panel.views.stamp)}}
    for name, make in (("bar", panel.views.bar), ("strip", panel.views.strip)):
        results[f"view of the {name}"] = {"ms": _median_ms(make)}
    for tab in panel.panes.tabs:
        panel.panes.tab = tab
        session.step()
        panel.redraw()
        sent.num_bytes, times = 0, []
        for _ in range(_REPEATS):
            session.step()
            times.append(_median_ms(panel.redraw, 1))
        view_ms = _median_ms(lambda tab=tab: panel.views.pane(tab))
        kilobytes = sent.num_bytes / _REPEATS / 1e3
        results[f"redraw, pane {tab}"] = {"ms": statistics.median(times), "view ms": view_ms, "kB": kilobytes}
    panel.close()
    session.close()
    return results


class _PackedMessages:
    """From now on widgets' messages are packed and signed as a kernel does it, and counted instead of sent."""

    def __init__(self) -> None:
        import comm
        from comm.base_comm import BaseComm
        from jupyter_client.session import Session as Wire

        self.num_bytes = 0
        wire = Wire(key=b"key")

        class Packed(BaseComm):
            def publish_msg(self, msg_type: str, data: Any = None, *_: Any, **__: Any) -> None:
                parts = wire.serialize(wire.msg(msg_type, {"data": data}))
                tell(sum(map(len, parts)))

        def tell(count: int) -> None:
            self.num_bytes += count

        comm.create_comm = Packed


def _long_session(iterations: int) -> Session:
    """One row for most of the way, for time's sake, and then sixty-four."""
    length = 4_000
    session = Session(
        "oracle",
        device="cpu",
        max_requests=_ROWS,
        max_batch_tokens=4_096,
        max_sequence_length=4_096,
        num_blocks=6_000,
        graphs=(1, _ROWS),
    )
    while session.engine.controller.next_index < iterations:
        if session.finished:
            session.submit([1, 2, 3], max_tokens=length, ignore_eos=True)
        session.run(iterations - session.engine.controller.next_index)
    session.submit([[1, 2, 3]] * _ROWS, max_tokens=1_000, ignore_eos=True)
    session.run(300)
    return session


def _median_ms(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)
