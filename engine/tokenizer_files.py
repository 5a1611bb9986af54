"""Building a :class:`~engine.tokenizer.Tokenizer` from a checkpoint folder or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError
from engine.models.checkpoint import read_json
from engine.tokenizer import Tokenizer, checked_template

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_OTHER_KINDS = ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_GGUF_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
"""How text is cut before merges, for those that are one regular expression."""

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2
_SPACE = "\u2581"
"""SentencePiece's visible space."""


def read_folder(path: Path) -> Tokenizer | None:
    """See :meth:`engine.tokenizer.Tokenizer.from_folder`."""
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        others = [name for name in _OTHER_KINDS if (path / name).is_file()]
        if others:
            raise CheckpointError(
                f"{path} has {others[0]} but no tokenizer.json; write one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer this library reads: {error}") from error
    config_file = path / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    _add_declared_tokens(backend, config)
    named = {name: text for name in _NAMED if (text := _token_text(config.get(name))) is not None}
    if "add_bos_token" in config or "add_eos_token" in config:
        _surround(backend, named, bos=bool(config.get("add_bos_token")), eos=bool(config.get("add_eos_token")))
    return Tokenizer(
        backend,
        eos_tokens=[named["eos_token"]] if "eos_token" in named else [],
        named_tokens=named,
        chat_template=_folder_template(path, config),
    )


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return checked_template(config.get("chat_template"), str(path / "tokenizer_config.json"))


def _token_text(entry: Any) -> str | None:
    """A token written as a string or as ``{"content": ...}``."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens that only ``tokenizer_config.json`` declares, in the order of their ids."""
    from tokenizers import AddedToken

    declared = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            options = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
            normalized = bool(entry.get("normalized", not options["special"]))
            backend.add_tokens([AddedToken(entry["content"], normalized=normalized, **options)])


def _surround(backend: tokenizers.Tokenizer, named: Mapping[str, str], *, bos: bool, eos: bool) -> None:
    """Put BOS before and EOS after every text; a flag without its token does nothing, as in transformers."""
    from tokenizers.processors import TemplateProcessing

    before = [named["bos_token"]] if bos and "bos_token" in named else []
    after = [named["eos_token"]] if eos and "eos_token" in named else []
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])],
    )


def read_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """See :meth:`engine.tokenizer.Tokenizer.from_gguf`."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("GGUF metadata lacks tokenizer.ggml.tokens")
    if kind == "gpt2":
        backend = _gguf_byte_level(tokens, metadata)
    elif kind == "llama":
        backend = _gguf_sentencepiece(tokens, metadata)
    else:
        raise CheckpointError(f"GGUF tokenizer.ggml.model must be 'gpt2' or 'llama', got {kind!r}")
    _add_typed_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    named = {
        name: tokens[index]
        for name, key in zip(_NAMED, ("bos", "eos", "unknown", "padding"), strict=True)
        if (index := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    split = str(metadata.get("tokenizer.ggml.pre"))
    if kind == "llama" or _GGUF_SPLITS.get(split) == _LLAMA3_SPLIT:
        bos = metadata.get("tokenizer.ggml.add_bos_token", True)
        _surround(backend, named, bos=bool(bos), eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)))
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        eos_tokens=[tokens[index] for index in ends if index is not None],
        named_tokens=named,
        chat_template=checked_template(metadata.get("tokenizer.chat_template"), "GGUF metadata"),
    )


def _add_typed_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN):
            backend.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False)])


def _gguf_byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE. Only Llama 3 adds BOS: other files set ``add_bos_token`` where transformers adds none."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    if not merges:
        raise CheckpointError("GGUF metadata lacks tokenizer.ggml.merges")
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    by_pattern = split in _GGUF_SPLITS
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_pattern)
    if by_pattern:
        steps = [pre_tokenizers.Split(Regex(_GGUF_SPLITS[split]), behavior="isolated"), bytes_step]
    elif split == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), bytes_step]
    elif split in ("gpt-2", "default"):
        steps = [bytes_step]
    else:
        known = ", ".join([*_GGUF_SPLITS, "smollm", "gpt-2", "default"])
        raise CheckpointError(f"GGUF tokenizer.ggml.pre must be one of {known}; got {split!r}")
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3's vocabulary holds words that its merges do not reach.
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=_GGUF_SPLITS.get(split) == _LLAMA3_SPLIT))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: scores rank the merges, bytes stand in for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError("GGUF metadata needs one tokenizer.ggml.scores entry a token")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first" if prefix else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best-scored token first, as SentencePiece would try them."""
    ranked = []
    for token, index in vocab.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        ranked += [(-scores[index], -len(left), vocab[left], (left, right)) for left, right in pairs]
    return [pair for *_, pair in sorted(ranked)]
