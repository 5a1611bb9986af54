"""The kernel's side of :mod:`benchmarks.ui_panel`: sessions under a panel, and what runs with and without one cost."""

from __future__ import annotations

import asyncio
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from workbench.panel.panel import Panel
from workbench.repeats import median_interval
from workbench.session import Session

ROWS = 8
WARMUP = 20
"""Iterations of a run that do not count: prompts are read in them, and the first phases are slow."""
_SETTLES_S = 1.2
"""Longer than the panel's ticker rests: then a run that has ended is shown."""
_NEAR_NS = 30_000_000
"""Behind the begin of a redraw: it has ended, and the thread that sends has sent it."""
_FEWEST = 10
"""Iterations between two redraws that tell what one takes."""
_PROMPT = [1, 2, 3]
_LENGTH = 2_000
_WAVES = 4
_MODELS: dict[str, dict[str, Any]] = {"oracle": {"op_sleep_s": 0.001}, "shape:tiny": {}}
"""By name of what is measured: a device that computes for a while without a CPU, and one that needs the CPU."""


def make_session(model: str) -> Session:
    """Eight rows on the CPU device."""
    torch.set_num_threads(1)
    return Session(
        model,
        device="cpu",
        max_requests=ROWS,
        max_batch_tokens=_LENGTH + 96,
        max_sequence_length=_LENGTH + 96,
        num_blocks=ROWS * ((_LENGTH + 96) // 16 + 1),
        graphs=(ROWS,),
        **_MODELS[model],
    )


def fill(session: Session, *, waves: int = 1) -> None:
    """Start over with long greedy requests that keep every row busy, for 2,000 iterations a wave."""
    session.reset()
    session.submit([_PROMPT] * (waves * ROWS), max_tokens=_LENGTH, temperature=0, ignore_eos=True)


@dataclass
class Redraws:
    """How often a panel was redrawn, and how long that took."""

    is_counting: bool = False
    count: int = 0
    spent_s: float = 0.0
    cpu_s: float = 0.0
    """Of that on the kernel's own thread: the rest it waited for the interpreter or a core."""
    begun_ns: list[int] = field(default_factory=list)


class Bench:
    """A session, with a panel that follows it or without."""

    def __init__(self, model: str) -> None:
        self.session = make_session(model)
        self.redraws = Redraws()
        self._count_redraws()
        self.panel = Panel(self.session)
        self.heard: list[tuple[int, float]] = []
        """At each pause: iterations begun when the kernel heard of it, and when."""
        self.pairs: list[dict[str, float]] = []
        self._note_pauses()
        self.refill()

    def refill(self) -> None:
        """The session under the panel starts over, with every row decoding and more requests waiting."""
        fill(self.session, waves=_WAVES)
        self.session.run(WARMUP)

    def grow(self, num_spans: int) -> None:
        """Run until so many spans are recorded, and have them all sent."""
        fill(self.session, waves=10 * _WAVES)
        while len(self.session.recorder.spans(num_spans)) < num_spans:
            self.session.run(500)
        self.panel.timeline.load()

    def _count_redraws(self) -> None:
        plain = Panel.redraw

        def timed(panel: Panel, *, in_passing: bool = False) -> None:
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            plain(panel, in_passing=in_passing)
            if self.redraws.is_counting:
                self.redraws.count += 1
                self.redraws.begun_ns.append(int(begin * 1e9))
                self.redraws.spent_s += time.perf_counter() - begin
                self.redraws.cpu_s += time.thread_time() - begin_cpu

        Panel.redraw = timed  # type: ignore[method-assign]

    def _note_pauses(self) -> None:
        plain = self.session.pause

        def noted() -> None:
            self.heard.append((self.begun, time.time()))
            plain()

        self.session.pause = noted  # type: ignore[method-assign]

    @property
    def begun(self) -> int:
        """Iterations of the session under the panel."""
        return self.session.engine.controller.next_index

    def begun_after(self, epoch_s: float) -> int:
        """Iterations that began after a moment of the wall clock."""
        since_ns = time.perf_counter_ns() - int((time.time() - epoch_s) * 1e9)
        return sum(record.begin_ns > since_ns for record in self.session.iterations())

    async def compare(self, count: int, seconds: float) -> None:
        """Fill ``pairs``: runs with the panel on the page and off it in turns, each about so long.

        One before them sets their length. All are of the one session: of two that were made alike one ran 2 % slower
        than the other, without any panel.
        """
        self.pairs.clear()
        iterations = min(int(seconds / (await self._steps(60, is_shown=False))[0]), _LENGTH - 2 * WARMUP)
        legs = [True, False]
        for _ in range(count):
            legs.reverse()
            self.redraws = Redraws()
            begins_ns: list[int] = []
            steps = {}
            for is_shown in legs:
                steps[is_shown] = await self._steps(iterations, is_shown=is_shown)
                if is_shown:
                    begins_ns = [record.begin_ns for record in self.session.iterations()]
            step_s, cpu_s = ({leg: of[at] for leg, of in steps.items()} for at in (0, 1))
            shown_s = step_s[True] * iterations
            self.pairs.append(
                {
                    "ratio": step_s[False] / step_s[True],
                    "lost": lost_share(begins_ns, self.redraws.begun_ns),
                    "cpu ratio": cpu_s[True] / cpu_s[False],
                    "tokens/s": ROWS / step_s[True],
                    "step_ms": 1e3 * step_s[False],
                    "redraws/s": self.redraws.count / shown_s,
                    "share": self.redraws.spent_s / shown_s,
                    "share of cpu": self.redraws.cpu_s / shown_s,
                }
            )

    async def _steps(self, iterations: int, *, is_shown: bool) -> tuple[float, float]:
        """Seconds an iteration, and those of a core that all threads of the kernel took together.

        What the panel has to do before and behind the run is not in them.
        """
        session = self.session
        if is_shown:
            self.panel._repr_mimebundle_()  # as a cell that shows it anew
        else:
            self.panel.leave_page()
        fill(session)
        await session.run_async(WARMUP)
        await asyncio.sleep(_SETTLES_S)
        self.redraws.is_counting = is_shown
        begin, begin_cpu = time.perf_counter(), time.process_time()
        await session.run_async(iterations)
        took_s, took_cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
        self.redraws.is_counting = False
        await asyncio.sleep(_SETTLES_S)
        return took_s / iterations, took_cpu_s / iterations

    def medians(self) -> dict[str, float]:
        """Over the pairs; of the ratio also where its median lies, and the lowest and the highest."""
        names = self.pairs[0]
        ratios = [pair["ratio"] for pair in self.pairs]
        told = {name: statistics.median(pair[name] for pair in self.pairs) for name in names}
        lies = median_interval(ratios)
        between = {} if lies is None else {"ratio from": lies.low, "ratio to": lies.high, "confidence": lies.confidence}
        return told | between | {"lowest": min(ratios), "highest": max(ratios)}


def lost_share(begins_ns: Sequence[int], redraws_ns: Sequence[int]) -> float:
    """Share of a run's time that iterations around redraws took longer than those between them.

    Both are of one run and lie a tenth of a second apart, so a machine that is faster or slower by the minute does not
    count; nor does what a panel costs far from its redraws, such as a page that paints.

    Args:
        begins_ns: When each iteration began, rising.
        redraws_ns: When each redraw began, rising.
    """
    lost_ns: list[float] = []
    lasted_ns: list[int] = []
    for begun_ns, next_ns in pairwise(redraws_ns):
        first, last = bisect_right(begins_ns, begun_ns) - 1, bisect_right(begins_ns, next_ns) - 1
        clear = bisect_left(begins_ns, begun_ns + _NEAR_NS)
        if first < 0 or last - clear < _FEWEST:
            continue
        step_ns = (begins_ns[last] - begins_ns[clear]) / (last - clear)
        lost_ns.append(begins_ns[clear] - begins_ns[first] - (clear - first) * step_ns)
        lasted_ns.append(next_ns - begun_ns)
    return statistics.median(lost_ns) / statistics.fmean(lasted_ns) if lost_ns else float("nan")
