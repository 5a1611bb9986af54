"""Text from token ids as they come, cut at stop strings, never in the middle of a character."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from engine.sampling.stops import StopHit, StopMatcher

_UNKNOWN = "\ufffd"
_MAX_OPEN_CHARS = 3
"""A character still being received shows as up to this many U+FFFD: one, or one a byte by some decoders."""
_MAX_WINDOW = 48
"""Tokens decoded at once, at most."""
_MIN_WINDOW = 16
"""Tokens kept when a window that never came to a clean end is shortened: more than open characters can span."""


class _TextWindow:
    """Turns tokens into text pieces by decoding only the last few of them.

    ``_ids[: _read]`` ended on a whole character and are kept because decoders look at what comes before (a
    word's leading space, for instance). ``_shown`` is the part of the window's text that has been given out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        self._shown = ""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, often with what earlier tokens began."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._shown and text:
            self._ids.pop()  # no text of its own, such as a special token: it would push the context out
            return ""
        sure = self._without_open_character(text)
        if not sure.startswith(self._shown):
            return self._recover(text)
        piece = sure[len(self._shown) :]
        self._shown = sure
        if sure == text:
            self._advance()
        elif len(self._ids) > _MAX_WINDOW:
            self._shorten(text[len(sure) :])
        return piece

    def finish(self) -> str:
        """What is left, an unfinished character shown as the decoder shows it."""
        if not self._ids:
            return ""
        text = self._decode(self._ids)
        piece = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(self._ids[self._read :])
        self._ids, self._read, self._shown = [], 0, ""
        return piece

    @staticmethod
    def _without_open_character(text: str) -> str:
        num_unknown = len(text) - len(text.rstrip(_UNKNOWN))
        return text[: len(text) - min(num_unknown, _MAX_OPEN_CHARS)]

    def _advance(self) -> None:
        """The window ends on a whole character: its newest tokens become what the next ones are decoded after."""
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)

    def _shorten(self, pending: str) -> None:
        """Bound the work on a long run of bytes that are no text."""
        ids = self._ids[-_MIN_WINDOW:]
        text = self._decode(ids)
        if text.endswith(pending):
            self._ids, self._read = ids, 0
            self._shown = text[: len(text) - len(pending)]

    def _recover(self, text: str) -> str:
        """The decoder took back text given out before, as byte fallback does while a run of bytes is no UTF-8.

        An unfinished character behind a finished one looks so until it is complete; more than that is not
        text, and the new tokens are then decoded on their own.
        """
        new_ids = self._ids[self._read :]
        if text.endswith(_UNKNOWN) and len(new_ids) <= _MAX_OPEN_CHARS:
            return ""
        self._ids, self._read = new_ids, 0
        self._shown = self._without_open_character(self._decode(new_ids))
        return self._shown


class IncrementalDetokenizer:
    """The text of one request, token by token.

    A token's text is every character that is whole once the token is there. A stop string is matched on whole
    characters across token borders; the token that completes it is the request's last. Text is released in
    whole tokens: what is held back because a stop string may have begun takes the rest of its token with it.

    Args:
        decode: Ids to text, as the tokenizer does it for a list; called with a few ids at a time.
        stops: Strings that end the text, none empty.
        include_stop: Keep the stop string in the text.
        min_tokens: A stop string must be completed by a token after the first ``min_tokens``: at output index
            ``min_tokens`` at the earliest, just as EOS. It may begin before. One completed too early is no match.
        skip: Ids without text, counted all the same.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip: frozenset[int] = frozenset(),
    ) -> None:
        self._window = _TextWindow(decode)
        self._matcher = StopMatcher(stops, include_stop)
        self._min_tokens = min_tokens
        self._skip = skip
        self._ends: list[int] = []
        """Of each token: characters of the text up to and with it."""
        self._num_chars = 0
        """Characters decoded."""
        self._num_safe = 0
        """Characters that the matcher let pass; those after ``len(self.text)`` are in ``_unreleased``."""
        self._unreleased = ""
        self._is_finished = False
        self._num_taken = 0
        self.text = ""
        """All released text; it only grows."""

    @property
    def hit(self) -> StopHit | None:
        """The stop string that ended the text; ``start`` counts characters of the text."""
        return self._matcher.hit

    @property
    def hit_token(self) -> int | None:
        """Output index of the token that completed it: the request's last."""
        return None if self.hit is None else self._token_at(self.hit)

    @property
    def num_tokens(self) -> int:
        """Tokens taken in; with a hit, those that belong to the request."""
        return len(self._ends) if self.hit is None else self._token_at(self.hit) + 1

    @property
    def num_released_tokens(self) -> int:
        """Tokens that belong to the request for sure and whose text is in ``text`` (or was cut from it).

        Fewer than ``num_tokens`` while text is held back. A chunk of output that ends here agrees in ids and text.
        """
        if self._is_settled():
            return self.num_tokens
        return bisect_right(self._ends, len(self.text))

    def append(self, token_id: int) -> None:
        """Take the next token. After a hit or ``finish`` it is dropped."""
        if self._is_settled():
            return
        piece = "" if token_id in self._skip else self._window.push(token_id)
        self._num_chars += len(piece)
        self._ends.append(self._num_chars)
        self._accept(self._matcher.feed(piece, armed=len(self._ends) > self._min_tokens))

    def take(self) -> str:
        """Text released since the last call."""
        piece = self.text[self._num_taken :]
        self._num_taken = len(self.text)
        return piece

    def finish(self) -> None:
        """No more tokens: release everything. A match that waited for a longer or earlier one becomes the hit."""
        if self._is_settled():
            return
        piece = self._window.finish()
        self._num_chars += len(piece)
        if self._ends:
            self._ends[-1] = self._num_chars
        safe = self._matcher.feed(piece, armed=len(self._ends) > self._min_tokens)
        self._is_finished = True
        self._accept(safe + self._matcher.flush())

    def _is_settled(self) -> bool:
        return self._is_finished or self.hit is not None

    def _accept(self, safe: str) -> None:
        self._unreleased += safe
        self._num_safe += len(safe)
        release_to = self._num_safe
        if not self._is_settled():
            whole_tokens = bisect_right(self._ends, self._num_safe)
            release_to = self._ends[whole_tokens - 1] if whole_tokens else 0
        length = release_to - len(self.text)
        self.text += self._unreleased[:length]
        self._unreleased = self._unreleased[length:]

    def _token_at(self, hit: StopHit) -> int:
        return bisect_left(self._ends, hit.end)
