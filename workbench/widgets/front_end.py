"""Front-ends as anywidget wants them: one ES module and one style sheet, read from the files in this folder."""

from __future__ import annotations

import re
from pathlib import Path

HOME = Path(__file__).resolve().parent

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./[^\"]+\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)


def joined_module(*names: str) -> str:
    """Several modules of this folder as one, because anywidget loads a single text that has no address to import from.

    The modules import each other by ``import { a } from "./b.js";`` alone, in the order given here, and share no
    top-level name; so they also run as they are, where a server hands them out.
    """
    texts = [(HOME / name).read_text(encoding="utf-8") for name in names]
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)


def style_sheet(name: str) -> str:
    """A style sheet of this folder."""
    return (HOME / name).read_text(encoding="utf-8")
