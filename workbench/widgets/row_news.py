"""The requests pane as a picture and what has changed since, so that in a run only what changes of rows is sent.

News always count from the picture and not from the news before: a page that opens late, is loaded again or missed a
message has the truth as soon as it has both. In a run they come to the page with the control bar, and on the way of the
picture when all is shown.
"""

from __future__ import annotations

from typing import Any

from workbench.panel.messages import RequestRow, RequestsNews, RequestsPicture, RequestsView

MORE_BLOCKS = "more_blocks"
"""Of a row whose blocks are the picture's and some more, those; it stands in the place of ``blocks``."""
_MOST_MORE = 16
"""On the average of the rows that have changed; from there on a new picture is shorter."""
NO_NEWS: dict[str, Any] = {}


class RowNews:
    """What the browser has of the requests, and what it has to be sent."""

    def __init__(self) -> None:
        self._number = 0
        self._last: RequestsNews | None = None
        self._are_carried = False
        """Whether news of this picture came by another way than with it."""
        self._picture: RequestsPicture | None = None
        self._rows: dict[str, RequestRow] = {}

    def of(self, view: RequestsView) -> tuple[RequestsPicture, RequestsNews | None]:
        """The picture, a new one where much differs from the last, and what has changed since."""
        news = self._since_picture(view)
        if self._picture is None or news is None or _is_much(news, view):
            return self._take(view), None
        is_same = not news["rows"] and news["order"] is None and _is_rest_same(self._picture, view)
        # Those that were carried are taken back by later ones alone.
        return self._picture, None if is_same and not self._are_carried else news

    def to_carry(self, view: RequestsView) -> RequestsNews | None:
        """What has changed since the picture, however much that is; None: it takes a new picture."""
        news = self._since_picture(view)
        self._are_carried |= news is not None
        return news

    def _since_picture(self, view: RequestsView) -> RequestsNews | None:
        rows = view["rows"]
        order = [row["request_id"] for row in rows]
        # One name twice: a request of the session waits until one that was handed to the engine itself has ended.
        if self._picture is None or len({*order}) < len(order):
            return None
        last = self._last
        news = RequestsNews(
            since=self._number,
            number=0 if last is None else last["number"],
            order=None if order == [*self._rows] else order,
            rows=[changed for row in rows if (changed := _changed(self._rows.get(row["request_id"]), row))],
            left_out=view["left_out"],
            hint=view["hint"],
        )
        if last is None or news != last:
            news["number"] += 1
            self._last = news
        return self._last

    def _take(self, view: RequestsView) -> RequestsPicture:
        self._number += 1
        self._are_carried = False
        self._picture = RequestsPicture(**view, number=self._number)
        self._rows = {row["request_id"]: row for row in view["rows"]}
        return self._picture


def with_news(picture: RequestsPicture, *told: RequestsNews | None) -> RequestsView:
    """What they say together, as the browser reads them: of several news to this picture the latest hold."""
    its_own = [news for news in told if news and news["since"] == picture["number"]]
    news = max(its_own, key=lambda one: one["number"], default=None)
    if news is None:
        return RequestsView(rows=picture["rows"], left_out=picture["left_out"], hint=picture["hint"])
    known: dict[str, Any] = {row["request_id"]: row for row in picture["rows"]}
    for row in news["rows"]:
        known[row["request_id"]] = _merged(known.get(row["request_id"], {}), row)
    order = [row["request_id"] for row in picture["rows"]] if news["order"] is None else news["order"]
    return RequestsView(rows=[known[name] for name in order], left_out=news["left_out"], hint=news["hint"])


def _changed(old: RequestRow | None, new: RequestRow) -> dict[str, Any]:
    """Fields of a row that are not as they were, and whose they are; empty if all are."""
    if old is new:
        return {}
    if old is None:
        return {**new}
    known: dict[str, Any] = {**old}
    fields = {name: value for name, value in new.items() if known.get(name, known) != value}
    had = known.get("blocks")
    if had and "blocks" in fields and new["blocks"][: len(had)] == had:
        del fields["blocks"]
        fields[MORE_BLOCKS] = new["blocks"][len(had) :]
    return {"request_id": new["request_id"], **fields} if fields else {}


def _merged(old: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    row = {**old, **fields}
    if MORE_BLOCKS in row:
        row["blocks"] = [*old["blocks"], *row.pop(MORE_BLOCKS)]
    return row


def _is_much(news: RequestsNews, view: RequestsView) -> bool:
    """Whether more than half of the rows differ, or those that do have got many blocks."""
    num_more = sum(len(row.get(MORE_BLOCKS, ())) for row in news["rows"])
    return 2 * len(news["rows"]) > len(view["rows"]) or num_more > _MOST_MORE * len(news["rows"])


def _is_rest_same(picture: RequestsPicture, view: RequestsView) -> bool:
    return (picture["left_out"], picture["hint"]) == (view["left_out"], view["hint"])
