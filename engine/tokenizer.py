"""Text to ids and back: the ``tokenizers`` library behind the few calls the engine makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """An encoder and decoder of one vocabulary, with its chat template.

    Safe to call from several threads; holds no state between calls. ``decode`` of any window of ids works, which is
    what an incremental detokeniser builds on.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_tokens: Iterable[str] = (),
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Wrap ``backend``.

        Args:
            backend: The library's tokenizer; padding and truncation are switched off on it.
            eos_tokens: Tokens that end a text.
            named_tokens: What a chat template may name: ``bos_token``, ``eos_token``, ...
            chat_template: Jinja source.
        """
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._named_tokens = dict(named_tokens or {})
        self._chat_template = chat_template
        ids = (backend.token_to_id(token) for token in eos_tokens)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ids if i is not None))
        """Ids that end a text."""
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        """Ids that ``decode`` leaves out."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, added ones included."""

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """Read ``tokenizer.json`` and ``tokenizer_config.json``; None if the folder has no tokenizer at all.

        Raises:
            CheckpointError: The files are damaged, or there is only a SentencePiece or slow tokenizer.
        """
        from engine.tokenizer_files import read_folder

        return read_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's ``tokenizer.*`` entries.

        Raises:
            CheckpointError: Its kind, or the way it splits text, is not known here.
        """
        from engine.tokenizer_files import read_gguf

        return read_gguf(metadata)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` works."""
        return self._chat_template is not None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written in it are recognised.

        Args:
            text: Any string.
            add_special: Also add what the checkpoint puts around every text, such as a BOS token.
        """
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``. Bytes that are no UTF-8 (a character cut in two) come out as U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of one id; None outside the vocabulary."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """Write a conversation in the model's own format. Encode the result with ``add_special=False``.

        Args:
            messages: Mappings with ``role`` and ``content``.
            add_generation_prompt: End with what makes the model answer.
            extra: Further variables for the template, for instance ``enable_thinking``.

        Raises:
            RequestError: There is no template, or it refuses these messages.
        """
        if self._chat_template is None:
            raise RequestError("messages need a chat template, and this checkpoint has none", field="messages")
        from engine.chat_template import render

        variables = {**self._named_tokens, "add_generation_prompt": add_generation_prompt, **extra}
        return render(self._chat_template, [dict(message) for message in messages], variables)


def checked_template(template: Any, source: str) -> str | None:
    """A chat template as one string; of several named ones, ``default``.

    Raises:
        CheckpointError: It is neither.
    """
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError(f"{source}: chat_template must be a string or a list with one called 'default'")
