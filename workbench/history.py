"""Past iterations: their records, what was watched, and, where it was recorded, every phase's reads and writes."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from engine.controller import Border
from engine.engine import Engine
from engine.phases import Order, Phase
from tracing.recorder import Recorder
from tracing.records import IterationRecord
from workbench.changes import Change, PhaseChanges, phase_changes, table_changes
from workbench.expressions import Expressions
from workbench.images import BorderImage, Photographer, TableImage
from workbench.peek import SessionError, as_phase

CAPACITY = 256
"""Iterations whose changes are kept, the newest."""


@dataclass(slots=True)
class RecordedIteration:
    """The images of one iteration: before its first phase, and behind each."""

    index: int
    order: Order
    first: BorderImage
    behind: dict[Phase, BorderImage] = field(default_factory=dict)

    @property
    def last(self) -> BorderImage:
        """The newest image."""
        return next(reversed(self.behind.values()), self.first)

    def changes(self, phase: Phase) -> PhaseChanges:
        """What ``phase`` read and wrote; it must have run."""
        phases = list(self.behind)
        at = phases.index(phase)
        before = self.behind[phases[at - 1]] if at else self.first
        return phase_changes(
            iteration=self.index, order=self.order.label, phase=phase, before=before, behind=self.behind[phase]
        )


class ChangeRecorder:
    """Takes an image at every border while it is on, and voids the times of the iterations it watches.

    The newest :data:`CAPACITY` iterations are kept.
    """

    def __init__(self, engine: Engine) -> None:
        self._photographer = Photographer(engine)
        self._iterations: OrderedDict[int, RecordedIteration] = OrderedDict()
        self._open: RecordedIteration | None = None
        self.enabled = False

    def __call__(self, border: Border) -> None:
        """At every border, while it is on."""
        iteration, is_first = border.iteration, border.phase is border.iteration.order.phases[0]
        if border.side == "before" and is_first:
            iteration.void_reasons.add("changes_recorded")
            image = self._photographer.take(iteration, None)
            self._open = RecordedIteration(iteration.index, iteration.order, image)
            self._iterations[iteration.index] = self._open
            if len(self._iterations) > CAPACITY:
                self._iterations.popitem(last=False)
        elif border.side == "after" and self._open is not None and self._open.index == iteration.index:
            self._open.behind[border.phase] = self._photographer.take(iteration, self._open.last)

    def get(self, index: int) -> RecordedIteration | None:
        """The images of an iteration; None if there are none (any more)."""
        return self._iterations.get(index)

    @property
    def indices(self) -> list[int]:
        """Iterations of which there are images, oldest first."""
        return list(self._iterations)

    def clear(self) -> None:
        """Forget all."""
        self._iterations.clear()
        self._open = None


@dataclass(frozen=True, kw_only=True)
class PastIteration:
    """One iteration as it was. A prompt shows it as text, a notebook as tables."""

    index: int
    record: IterationRecord | None
    """None where the recorder was off, or the iteration has not ended."""
    watched: Mapping[str, Any]
    """Watch expressions and their values at its end."""
    recorded: RecordedIteration | None = field(repr=False)

    @property
    def has_changes(self) -> bool:
        """Whether its tables and changes were recorded."""
        return self.recorded is not None

    @property
    def before(self) -> TableImage:
        """The request table when it began; SessionError if it was not recorded."""
        return self._images().first.table

    @property
    def after(self) -> TableImage:
        """The request table at its end; SessionError if it was not recorded."""
        return self._images().last.table

    @property
    def changed(self) -> tuple[Change, ...]:
        """How the table differs between :attr:`before` and :attr:`after`."""
        return tuple(table_changes(self.before, self.after))

    @property
    def phases(self) -> tuple[PhaseChanges, ...]:
        """What each phase read and wrote, in order; SessionError if it was not recorded."""
        images = self._images()
        return tuple(images.changes(phase) for phase in images.behind)

    def phase(self, phase: Phase | str) -> PhaseChanges:
        """One of them.

        Raises:
            SessionError: its changes were not recorded, or it had no such phase.
        """
        wanted, images = as_phase(phase), self._images()
        if wanted not in images.behind:
            ran = ", ".join(one.value for one in images.behind) or "none"
            raise SessionError(f"iteration {self.index} ran no {wanted.value}; its phases are {ran}")
        return images.changes(wanted)

    def _images(self) -> RecordedIteration:
        if self.recorded is None:
            raise SessionError(
                f"the changes of iteration {self.index} are not there: set session.record_changes = True before it "
                f"runs; the newest {CAPACITY} are kept"
            )
        return self.recorded

    def __str__(self) -> str:
        from workbench.history_view import iteration_text

        return iteration_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from workbench.history_view import iteration_html

        return iteration_html(self)


class History:
    """Iterations of a session by number: ``session.history[7]``, ``session.history[-1]`` for the newest."""

    def __init__(self, recorder: Recorder, changes: ChangeRecorder, expressions: Expressions) -> None:
        self._recorder = recorder
        self._changes = changes
        self._expressions = expressions

    @property
    def indices(self) -> list[int]:
        """Numbers of the iterations that can be looked at, ascending."""
        known = {record.iteration for record in self._recorder.iterations()}
        return sorted(known.union(self._changes.indices))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[PastIteration]:
        records = {record.iteration: record for record in self._recorder.iterations()}
        return (self._made(index, records.get(index)) for index in self.indices)

    def __getitem__(self, index: int) -> PastIteration:
        """An iteration by its number; negative ones count from the newest.

        Raises:
            SessionError: nothing is known of it.
        """
        if isinstance(index, bool) or not isinstance(index, int):
            raise SessionError(f"history takes an iteration's number, got {index!r}")
        wanted = index if index >= 0 else self._newest + 1 + index
        record = self._record(wanted)
        if record is None and self._changes.get(wanted) is None:
            known = self.indices
            span = f"{known[0]} to {known[-1]} are" if known else "none is"
            raise SessionError(f"iteration {index} is not in the history; {span}")
        return self._made(wanted, record)

    @property
    def _newest(self) -> int:
        newest = [record.iteration for record in self._recorder.iterations()[-1:]]
        return max(newest + self._changes.indices[-1:], default=-1)

    def _record(self, index: int) -> IterationRecord | None:
        records = self._recorder.iterations()
        at = bisect_left(records, index, key=lambda record: record.iteration)
        return records[at] if at < len(records) and records[at].iteration == index else None

    def _made(self, index: int, record: IterationRecord | None) -> PastIteration:
        return PastIteration(
            index=index, record=record, watched=self._expressions.at(index), recorded=self._changes.get(index)
        )

    def diff(self, index: int, phase: Phase | str) -> PhaseChanges:
        """What one phase of an iteration read and wrote.

        Raises:
            SessionError: nothing is known of it, its changes were not recorded, or it had no such phase.
        """
        return self[index].phase(phase)

    def __repr__(self) -> str:
        known, recorded = self.indices, len(self._changes.indices)
        if not known:
            return "<History: no iteration yet>"
        return f"<History: iterations {known[0]} to {known[-1]}, changes of {recorded} recorded>"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self)[1:-1])}</div>"
