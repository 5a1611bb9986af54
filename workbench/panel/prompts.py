"""A prompt as a person types it: text where the model has a tokenizer, else token ids."""

from __future__ import annotations

import re

from engine.models.loader import LoadedModel
from workbench.book import Prompt
from workbench.panel.arguments import CommandError

_BETWEEN = re.compile(r"[\s,]+")


def read_prompt(loaded: LoadedModel, typed: str) -> Prompt:
    """The prompt to submit.

    Raises:
        CommandError: the model has no tokenizer, and ``typed`` is not a list of ids.
    """
    if loaded.tokenizer is not None:
        return typed
    try:
        return [int(piece) for piece in _BETWEEN.split(typed.strip(" \t\n,[]()"))]
    except ValueError:
        raise CommandError(
            f"submit: {loaded.name} has no tokenizer, so a prompt is token ids such as 3 5 8; got {typed!r}"
        ) from None
