"""Single tokens as text that can be seen: spaces, line ends and what no screen shows have marks of their own."""

from __future__ import annotations

from collections.abc import Iterable

from engine.tokenizer import Tokenizer

_MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}


def visible(text: str) -> str:
    """``text`` with its whitespace made visible; other characters that do not print as escapes."""
    return "".join(_MARKS.get(char) or (char if char.isprintable() else repr(char)[1:-1]) for char in text)


class TokenTexts:
    """What each id of a vocabulary adds to a text, worked out once an id.

    Without a tokenizer an id's text is its number.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        """The visible text of one id; part of a character that is cut in two shows as U+FFFD."""
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._text(token_id)
        return text

    def of_all(self, token_ids: Iterable[int]) -> list[str]:
        """The visible text of each of them."""
        known = self._known
        return [known.get(one) or self.of(one) for one in token_ids]

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return str(token_id)
        # Behind itself, for some tokenizers drop a text's first space; a special id decodes to nothing.
        once, twice = self._tokenizer.decode([token_id]), self._tokenizer.decode([token_id, token_id])
        added = twice[len(once) :] if twice.startswith(once) else once
        return visible(added or once) or visible(self._tokenizer.token(token_id) or "") or str(token_id)
