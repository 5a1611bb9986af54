"""What the phases of one iteration read and wrote, as cards; a card is made once, for what it shows does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.phases import Phase
from tracing.records import PHASE_COLOURS
from workbench.changes import Change, PhaseChanges, Reading
from workbench.device_values import READABLE
from workbench.history import CAPACITY, RecordedIteration
from workbench.history_view import value_text
from workbench.panel.hues import hue_of
from workbench.panel.messages import ChangesPane, PhaseCard, ValueCell

if TYPE_CHECKING:
    from workbench.session import Session

MOST_VALUES = 64
"""Values shown of what a phase read, and of what it wrote."""
_EVERYBODY = -1


class PhaseCards:
    """The cards of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._images: RecordedIteration | None = None
        self._cards: dict[Phase, PhaseCard] = {}

    def view(self, chosen: int | None = None, device_value: str = "") -> ChangesPane:
        """Of iteration ``chosen``; None: of the one in hand, or else of the newest that was recorded.

        Args:
            chosen: An iteration's number.
            device_value: The value read from the device last, as text.
        """
        session, images = self._session, self._recorded(chosen)
        return ChangesPane(
            recording=session.record_changes,
            iteration=chosen if images is None else images.index,
            title="" if images is None else _title(session, images),
            cards=[] if images is None else self._cards_of(images),
            device_values=readable_now(session),
            device_value=device_value,
            hint=_hint(session, chosen) if images is None else "",
        )

    def _recorded(self, chosen: int | None) -> RecordedIteration | None:
        changes = self._session._changes
        if chosen is None:
            newest = changes.indices[-1:]
            return changes.get(newest[0]) if newest else None
        return changes.get(chosen)

    def _cards_of(self, images: RecordedIteration) -> list[PhaseCard]:
        if images is not self._images:
            self._images, self._cards = images, {}
        for phase in tuple(images.behind):
            if phase not in self._cards:
                self._cards[phase] = _card(self._session, images.changes(phase))
        return [self._cards[phase] for phase in images.behind]


def readable_now(session: Session) -> list[str]:
    """Names that ``session.read_device`` takes now; logits only while a forward is pending."""
    engine = session.engine
    if engine.is_closed:
        return []
    return [name for name in READABLE if name != "logits" or engine.pending is not None]


def _title(session: Session, images: RecordedIteration) -> str:
    current = session.engine.in_hand
    in_hand = ", in hand" if current is not None and current.index == images.index else ""
    return f"iteration {images.index} {images.order.label}{in_hand}"


def _hint(session: Session, chosen: int | None) -> str:
    if not session.record_changes:
        return (
            "Switch recording on: what each phase then reads and writes is shown here. It takes time, so the times of "
            "those iterations are void."
        )
    if chosen is not None:
        return f"Iteration {chosen} was not recorded, or is older than the newest {CAPACITY} that are kept."
    return "Recording begins with the next iteration: step a phase."


def _card(session: Session, changes: PhaseChanges) -> PhaseCard:
    return PhaseCard(
        phase=changes.phase,
        colour=PHASE_COLOURS[changes.phase],
        read=[_read_cell(session, one) for one in changes.read[:MOST_VALUES]],
        wrote=[_written_cell(session, one) for one in changes.wrote[:MOST_VALUES]],
        enqueued=list(changes.enqueued),
        left_out=_hidden(changes.read) + _hidden(changes.wrote),
    )


def _hidden(values: Sequence[object]) -> int:
    return max(0, len(values) - MOST_VALUES)


def _read_cell(session: Session, one: Reading) -> ValueCell:
    return ValueCell(
        name=one.name,
        request_id=one.request_id or "",
        hue=_hue(session, one.request_id),
        old="",
        new=value_text(one.value),
        is_stale=one.is_stale,
        note=one.note,
    )


def _written_cell(session: Session, one: Change) -> ValueCell:
    return ValueCell(
        name=one.name,
        request_id=one.request_id or "",
        hue=_hue(session, one.request_id),
        old="" if one.old is None else value_text(one.old),
        new=value_text(one.new),
        is_stale=one.old_is_stale,
        note=one.note,
    )


def _hue(session: Session, request_id: str | None) -> int:
    return _EVERYBODY if request_id is None else hue_of(session, request_id)
