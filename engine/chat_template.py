"""Rendering chat templates as transformers does: sandboxed Jinja with the few helpers that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.errors import RequestError

if TYPE_CHECKING:
    import jinja2


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The conversation as text.

    Raises:
        RequestError: The template does not compile, or refuses the messages.
    """
    import jinja2

    try:
        return _compiled(template).render(messages=messages, **variables)
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's own tokens for training; here its body is just text."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own way)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which a model never saw.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
