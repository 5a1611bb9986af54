"""What a cluster shows: where its ranks stand, and their requests, as text and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.cluster_place import Place, RequestLine
from workbench.cluster_stepper import MEETINGS
from workbench.display import text_table

_TEXT = 60
_STYLE = "font-family:sans-serif;font-size:12px;border-collapse:collapse"
_CELL = "padding:2px 8px;text-align:left;border-bottom:1px solid #8884"


class Places(tuple[Place, ...]):
    """Where all ranks stand."""

    __slots__ = ()

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(place.rank),
                "-" if place.iteration is None else str(place.iteration),
                place.order or "-",
                place.reason or "-",
                place.ran or "-",
                _next_text(place),
                f"{place.num_live} live, {place.num_waiting} waiting",
                place.mode if place.state == "running" else f"{place.mode}, {place.state}",
            )
            for place in self
        ]

    _HEAD = ("rank", "iteration", "order", "because", "ran", "next", "requests", "mode")

    def __repr__(self) -> str:
        return "\n".join(text_table(self._HEAD, self._rows()))

    def _repr_html_(self) -> str:
        return _html(self._HEAD, self._rows())


def _next_text(place: Place) -> str:
    if place.is_between:
        return "the next iteration (all meet)" if place.has_work else "nothing to do"
    return f"{place.next_phase} (all meet)" if place.next_phase in MEETINGS else str(place.next_phase)


class RequestTable(tuple[RequestLine, ...]):
    """The requests of all ranks."""

    __slots__ = ()

    _HEAD = ("rank", "request", "state", "prompt", "output", "text")

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (str(one.rank), one.request_id, one.state, str(one.num_prompt), str(one.num_output), _short(one.text))
            for one in self
        ]

    def __repr__(self) -> str:
        return "\n".join(text_table(self._HEAD, self._rows())) if self else "no requests"

    def _repr_html_(self) -> str:
        return _html(self._HEAD, self._rows())


def _short(text: str) -> str:
    return repr(text) if len(text) <= _TEXT else repr(text[:_TEXT]) + "…"


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return f"<table style='{_STYLE}'>{''.join(lines)}</table>"


def _line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag} style='{_CELL}'>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
