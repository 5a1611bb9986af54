"""The newest tokens of each request as cells, made once a token."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Request
from engine.tokenizer import Tokenizer
from workbench.panel.messages import TokenCell
from workbench.panel.token_texts import TokenTexts

_KEPT = 24


@dataclass(slots=True)
class _Tail:
    cells: list[TokenCell]
    """The newest ones, at most :data:`_KEPT`."""
    num_tokens: int
    """Tokens the request had when they were made."""


class TokenTails:
    """Cells of the requests that are shown."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._texts = TokenTexts(tokenizer)
        self._tails: dict[int, _Tail] = {}
        self._used: set[int] = set()

    def of(self, request: Request, most: int) -> list[TokenCell]:
        """The newest ``most`` of a request, at most 24, oldest first."""
        self._used.add(request.key)
        tail = self._tails.get(request.key)
        output_ids = request.output_ids
        count = len(output_ids)
        if tail is None or tail.num_tokens > count:  # a stop string took tokens back
            tail = self._tails[request.key] = _Tail([], max(0, count - _KEPT))
        if tail.num_tokens < count:
            first = max(tail.num_tokens, count - _KEPT)
            new = [self._cell(request, place, output_ids[place]) for place in range(first, count)]
            tail.cells, tail.num_tokens = [*tail.cells, *new][-_KEPT:], count
        return tail.cells[-most:]

    def forget_unused(self) -> None:
        """Keep those that were asked for since the last call."""
        self._tails = {key: tail for key, tail in self._tails.items() if key in self._used}
        self._used.clear()

    def _cell(self, request: Request, place: int, token_id: int) -> TokenCell:
        title = f"id {token_id}, output {place}"
        if place < len(request.logprobs) and token_id in request.logprobs[place]:
            title = f"{title}, log-probability {request.logprobs[place][token_id]:.4f}"
        return TokenCell(text=self._texts.of(token_id), title=title)
