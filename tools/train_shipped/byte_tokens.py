"""Tokens of a byte-level model: a byte is its own id, then a file separator and padding.

The tokenizer is written as the JSON that the ``tokenizers`` library reads: byte-level BPE without merges.
"""

from __future__ import annotations

from typing import Any

SEPARATOR = 256
"""Stands before every file; begins a text and ends it."""
PAD = 257
SEPARATOR_TEXT = "<|endoftext|>"
PAD_TEXT = "<|pad|>"


def byte_spellings() -> list[str]:
    """The character that byte-level tokenizers write for each byte.

    Bytes that print in Latin-1 stand for themselves; the others take the code points from 256 on, in order.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return [chr(byte) if byte in printing else chr(256 + others.index(byte)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """Content of ``tokenizer.json``."""
    vocab = {spelling: byte for byte, spelling in enumerate(byte_spellings())}
    special = [(SEPARATOR, SEPARATOR_TEXT), (PAD, PAD_TEXT)]
    vocab.update({text: token for token, text in special})
    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = {"SpecialToken": {"id": SEPARATOR_TEXT, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in special],
        "normalizer": None,
        "pre_tokenizer": bytes_step,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SEPARATOR_TEXT: {"id": SEPARATOR_TEXT, "ids": [SEPARATOR], "tokens": [SEPARATOR_TEXT]}},
        },
        "decoder": bytes_step,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def tokenizer_config(max_position: int) -> dict[str, Any]:
    """Content of ``tokenizer_config.json``. Without clean-up: it would take spaces out of code."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": SEPARATOR_TEXT,
        "eos_token": SEPARATOR_TEXT,
        "pad_token": PAD_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
    }
