"""One hue a request, the same in every pane and for as long as the request is known."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.session import Session

NUM_HUES = 12


def hue_of(session: Session, request_id: str) -> int:
    """0 to 11 by order of submission; neighbours in that order differ."""
    book = session._desk.book
    if request_id in book:
        return book.submission(request_id).number % NUM_HUES
    return zlib.crc32(request_id.encode()) % NUM_HUES  # handed to the engine itself
