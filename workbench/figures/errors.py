"""What a user of figures can do wrong."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class FigureError(ValueError):
    """A figure cannot be made or saved; one line with the remedy."""


class FigureImportError(FigureError, ImportError):
    """A library that draws is not installed."""


def imported(module: str, needed_for: str) -> Any:
    """A module of an optional library.

    Raises:
        FigureImportError: it is not installed; the message names the extra that brings it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise FigureImportError(f"{needed_for} needs {library}: pip install '.[notebook]', or make lab") from error
