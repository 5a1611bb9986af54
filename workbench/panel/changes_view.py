"""What the phases of one iteration read and wrote, as cards; a card is made once, for what it shows does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.phases import Phase
from tracing.records import PHASE_COLOURS
from workbench.changes import Change, PhaseChanges, Reading
from workbench.device_values import READABLE
from workbench.history import CAPACITY, RecordedIteration
from workbench.history_view import value_text
from workbench.panel.hues import hue_of
from workbench.panel.messages import ChangesPane, PhaseCard, ValueCell
from workbench.panel.token_texts import TokenTexts

if TYPE_CHECKING:
    from workbench.session import Session

MOST_VALUES = 64
"""Values shown of what a phase read, and of what it wrote."""
_EVERYBODY = -1
_OF_TOKENS = ("newest token", "newest tokens", "verified ids", "sampled id", "token_ids")
"""How names of values end that are token ids."""


class PhaseCards:
    """The cards of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._images: RecordedIteration | None = None
        self._cards: dict[Phase, PhaseCard] = {}
        self._texts = TokenTexts(session.engine.loaded.tokenizer)

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
                self._cards[phase] = self._card(images.changes(phase))
        return [self._cards[phase] for phase in images.behind]

    def _card(self, changes: PhaseChanges) -> PhaseCard:
        return PhaseCard(
            phase=changes.phase,
            colour=PHASE_COLOURS[changes.phase],
            read=[self._read_cell(one) for one in changes.read[:MOST_VALUES]],
            wrote=[self._written_cell(one) for one in changes.wrote[:MOST_VALUES]],
            enqueued=list(changes.enqueued),
            left_out=_hidden(changes.read) + _hidden(changes.wrote),
        )

    def _read_cell(self, one: Reading) -> ValueCell:
        return ValueCell(
            name=one.name,
            request_id=one.request_id or "",
            hue=_hue(self._session, one.request_id),
            old="",
            new=self._text(one.name, one.value),
            is_stale=one.is_stale,
            note=one.note,
        )

    def _written_cell(self, one: Change) -> ValueCell:
        return ValueCell(
            name=one.name,
            request_id=one.request_id or "",
            hue=_hue(self._session, one.request_id),
            old="" if one.old is None else self._text(one.name, one.old),
            new=self._text(one.name, one.new),
            is_stale=one.old_is_stale,
            note=one.note,
        )

    def _text(self, name: str, value: Any) -> str:
        """A value in a few characters; token ids with their text beside them, where a tokenizer knows it."""
        if not name.endswith(_OF_TOKENS) or self._session.engine.loaded.tokenizer is None:
            return value_text(value)
        if isinstance(value, tuple):
            return value_text(tuple(f"{one} {self._texts.of(one)!r}" for one in value))
        return f"{value} {self._texts.of(value)!r}" if isinstance(value, int) else value_text(value)


def readable_now(session: Session) -> list[str]:
    """Names that ``session.read_device`` takes now; logits only while a forward is pending, drafts with drafting."""
    engine = session.engine
    if engine.is_closed:
        return []
    absent = {"logits"} if engine.pending is None else set()
    if not engine.config.speculative_tokens:
        absent.add("drafts")
    return [name for name in READABLE if name not in absent]


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
    if session.engine.in_hand is not None:
        return "The iteration in hand is not recorded: recording begins with the next one. Step (S) ends this one."
    return "Nothing is recorded yet: Phase (P) runs the first phase of the next iteration, and shows it here."


def _hidden(values: Sequence[object]) -> int:
    return max(0, len(values) - MOST_VALUES)


def _hue(session: Session, request_id: str | None) -> int:
    return _EVERYBODY if request_id is None else hue_of(session, request_id)
