"""The requests pane as a picture and what has changed since, so that in a run only rows that change are sent.

News always count from the picture and not from the news before: a page that opens late, is loaded again or missed a
message has the truth as soon as it has both.
"""

from __future__ import annotations

from typing import Any

from workbench.panel.messages import RequestRow, RequestsNews, RequestsPicture, RequestsView

NO_NEWS: dict[str, Any] = {}


class RowNews:
    """What the browser has of the requests, and what it has to be sent."""

    def __init__(self) -> None:
        self._number = 0
        self._picture: RequestsPicture | None = None
        self._rows: dict[str, RequestRow] = {}

    def of(self, view: RequestsView) -> tuple[RequestsPicture, RequestsNews | None]:
        """The picture, a new one where more than half of the rows differ from the last, and what has changed since."""
        rows = view["rows"]
        changed = [row for row in rows if not _is_same(self._rows.get(row["request_id"]), row)]
        order = [row["request_id"] for row in rows]
        # One name twice: a request of the session waits until one that was handed to the engine itself has ended.
        if self._picture is None or 2 * len(changed) > len(rows) or len({*order}) < len(order):
            return self._take(view), None
        if not changed and order == [*self._rows] and _is_rest_same(self._picture, view):
            return self._picture, None
        news = RequestsNews(
            since=self._number,
            order=None if order == [*self._rows] else order,
            rows=changed,
            left_out=view["left_out"],
            hint=view["hint"],
        )
        return self._picture, news

    def _take(self, view: RequestsView) -> RequestsPicture:
        self._number += 1
        self._picture = RequestsPicture(**view, number=self._number)
        self._rows = {row["request_id"]: row for row in view["rows"]}
        return self._picture


def with_news(picture: RequestsPicture, news: RequestsNews | None) -> RequestsView:
    """What both together say, as the browser reads them."""
    if not news or news["since"] != picture["number"]:
        return RequestsView(rows=picture["rows"], left_out=picture["left_out"], hint=picture["hint"])
    known = {row["request_id"]: row for row in (*picture["rows"], *news["rows"])}
    order = [row["request_id"] for row in picture["rows"]] if news["order"] is None else news["order"]
    return RequestsView(rows=[known[name] for name in order], left_out=news["left_out"], hint=news["hint"])


def _is_same(old: RequestRow | None, new: RequestRow) -> bool:
    return old is new or old == new


def _is_rest_same(picture: RequestsPicture, view: RequestsView) -> bool:
    return (picture["left_out"], picture["hint"]) == (view["left_out"], view["hint"])
