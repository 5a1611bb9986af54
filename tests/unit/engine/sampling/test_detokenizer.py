from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.sampling.detokenizer import IncrementalDetokenizer
from engine.sampling.stops import StopHit

UNKNOWN = "\ufffd"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps. " * 3,
    "Wörter mit Umlauten: äöü ÄÖÜ ß; 日本語のテキスト、漢字とかな。中文字符测试。한국어 텍스트 " * 3,
    "Emoji 😀😃👍🏽👩\u200d👩\u200d👧 and flags 🇩🇪🇯🇵 \u2028 tabs\t newlines\n\n " * 3,
]
SNIPPETS = [
    "hello",
    " the dog",
    "日本",
    "語",
    "😀",
    "👩\u200d👩\u200d👧",
    "🇩🇪",
    "é",
    "ß",
    " ",
    "\n",
    ".",
    "\t",
    "\u0301",
]
TEXTS = st.lists(st.sampled_from(SNIPPETS) | st.characters(codec="utf-8"), max_size=20).map("".join)


@cache
def byte_level() -> Tokenizer:
    """A byte-level BPE with few merges, so that most characters beyond ASCII span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama and Mistral have it: a space before words, and bytes for what the vocabulary lacks."""
    words = ["<unk>", "▁", "▁hello", "▁the", "▁dog", "hello", "日", "語", ".", "!"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def decode_bytes(ids: Sequence[int]) -> str:
    """One token a byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def decode_level(ids: Sequence[int]) -> str:
    return byte_level().decode(list(ids))


def decode_fallback(ids: Sequence[int]) -> str:
    return byte_fallback().decode(list(ids))


def deltas(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode)
    pieces = []
    for token in ids:
        detokenizer.append(token)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert "".join(pieces) == detokenizer.text
    assert detokenizer.num_tokens == detokenizer.num_released_tokens == len(ids)
    return pieces


def check_equals_whole_decode(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> None:
    assert "".join(deltas(decode, ids)) == decode(ids)


class TestText:
    @settings(max_examples=300)
    @given(text=TEXTS, cut=st.integers(0, 200))
    def test_equals_the_decode_of_all_ids_wherever_it_is_cut(self, text: str, cut: int) -> None:
        ids = byte_level().encode(text).ids
        check_equals_whole_decode(decode_level, ids)
        check_equals_whole_decode(decode_level, ids[:cut])
        check_equals_whole_decode(decode_bytes, list(text.encode())[:cut])

    @settings(max_examples=300)
    @given(ids=st.lists(st.integers(0, 300), max_size=60))
    def test_equals_it_for_ids_that_are_no_text(self, ids: list[int]) -> None:
        check_equals_whole_decode(decode_level, ids)

    @settings(max_examples=300)
    @given(data=st.lists(st.sampled_from([0x41, 0x80, 0x9F, 0xE2, 0x82, 0xAC, 0xF0, 0x98, 0xFF]), max_size=400))
    def test_equals_it_for_long_runs_of_broken_bytes(self, data: list[int]) -> None:
        check_equals_whole_decode(decode_bytes, data)

    @settings(max_examples=200)
    @given(text=TEXTS)
    def test_no_unknown_character_at_a_token_border(self, text: str) -> None:
        # Bug kind 49: a piece flushed in the middle of a character.
        text = text.replace(UNKNOWN, "")
        for piece in [
            *deltas(decode_level, byte_level().encode(text).ids),
            *deltas(decode_bytes, list(text.encode())),
        ]:
            assert UNKNOWN not in piece

    @pytest.mark.parametrize("kept", [1, 2, 3])
    def test_an_end_inside_an_emoji_gives_the_whole_part_and_one_unknown(self, kept: int) -> None:
        ids = list("hi 😀".encode())[: 3 + kept]
        pieces = deltas(decode_bytes, ids)

        assert pieces[-1] == UNKNOWN
        assert "".join(pieces) == "hi " + UNKNOWN

    def test_text_comes_with_the_token_that_completes_it(self) -> None:
        assert deltas(decode_bytes, list("aé b".encode())) == ["a", "", "é", " ", "b", ""]

    def test_no_tokens_give_no_text(self) -> None:
        assert deltas(decode_level, []) == [""]

    def test_tokens_without_text_count_and_change_nothing(self) -> None:
        end = byte_level().token_to_id("<end>")
        ids = byte_level().encode("the 日本 dog").ids
        with_ends = [token for pair in zip(ids, [end] * len(ids), strict=True) for token in [*pair, *[end] * 60]]
        skipping = IncrementalDetokenizer(decode_level, skip=frozenset([end]))
        for token in with_ends:
            skipping.append(token)

        assert skipping.text == "the 日本 dog"
        assert skipping.num_tokens == len(with_ends)
        assert "".join(deltas(decode_level, [ids[0], *[end] * 200, *ids[1:]])) == "the 日本 dog"


class TestByteFallback:
    @pytest.mark.parametrize(
        "text",
        ["hello the dog.", "日語é日", "😀", "😀😃👍", "hello 😀 the 😃😃 dog é!", "éééééééééééééééééééééééé", " hello"],
    )
    def test_equals_the_decode_of_all_ids_without_unknown_pieces(self, text: str) -> None:
        pieces = ["▁" + text.replace(" ", "▁")]
        ids: list[int] = []
        vocab = byte_fallback().get_vocab()
        rest = pieces[0]
        while rest:
            word = max((w for w in vocab if rest.startswith(w)), key=len, default=None)
            ids += [vocab[word]] if word else [vocab[f"<0x{byte:02X}>"] for byte in rest[0].encode()]
            rest = rest[len(word or rest[0]) :]

        assert decode_fallback(ids) == text
        given = deltas(decode_fallback, ids)
        assert "".join(given) == text
        assert not any(UNKNOWN in piece for piece in given)

    @settings(max_examples=200)
    @given(ids=st.lists(st.integers(1, 265), max_size=80))
    def test_ids_that_are_no_text_raise_nothing(self, ids: list[int]) -> None:
        # The decoder itself rewrites text it gave before, so equality is not to be had here.
        deltas(decode_fallback, ids)


class TestCost:
    @pytest.mark.parametrize("data", [b"a" * 3000, "日本語".encode() * 400, b"\x80" * 3000, b"\xf0\x9f" * 1500])
    def test_decodes_few_tokens_however_long_the_text(self, data: bytes) -> None:
        sizes = []

        def counting(ids: Sequence[int]) -> str:
            sizes.append(len(ids))
            return decode_bytes(ids)

        detokenizer = IncrementalDetokenizer(counting, stops=["never"])
        for token in data:
            detokenizer.append(token)

        assert max(sizes) <= 50
        assert len(sizes) <= 2 * len(data)

    def test_byte_fallback_holds_no_run_of_broken_bytes(self) -> None:
        vocab = byte_fallback().get_vocab()
        ids = [vocab["hello"], *(vocab[f"<0x{byte:02X}>"] for byte in [*"😀".encode(), *[0x80] * 300])]
        sizes = []

        def counting(window: Sequence[int]) -> str:
            sizes.append(len(window))
            return decode_fallback(window)

        detokenizer = IncrementalDetokenizer(counting)
        feed(detokenizer, ids)

        assert max(sizes) <= 50
        assert len(detokenizer.text) >= 280


def feed(detokenizer: IncrementalDetokenizer, tokens: Sequence[int]) -> str:
    for token in tokens:
        detokenizer.append(token)
    return detokenizer.take()


class Words:
    """A decoder of whole strings: token i is word i."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)

    @property
    def ids(self) -> range:
        return range(len(self.words))


class TestStops:
    def test_text_ids_and_hit_end_at_the_same_token(self) -> None:
        # Bug kind 12: the stop ends in the first of three tokens accepted in one step.
        words = Words("a", "b", "c.", "d", "e")
        detokenizer = IncrementalDetokenizer(words, stops=["."])
        feed(detokenizer, words.ids)

        assert (detokenizer.text, detokenizer.hit, detokenizer.hit_token) == ("abc", StopHit(".", 3), 2)
        assert detokenizer.num_tokens == detokenizer.num_released_tokens == 3

    def test_a_stop_across_tokens_is_never_streamed(self) -> None:
        words = Words("a", ",b", ",c d")
        detokenizer = IncrementalDetokenizer(words, stops=["b,c"])

        assert [feed(detokenizer, [i]) for i in words.ids] == ["a", "", ","]
        assert detokenizer.hit == StopHit("b,c", 2)

    def test_including_the_stop_cuts_right_behind_it(self) -> None:
        words = Words("a", ",b", ",c d")
        detokenizer = IncrementalDetokenizer(words, stops=["b,c"], include_stop=True)
        feed(detokenizer, words.ids)

        assert detokenizer.text == "a,b,c"
        assert detokenizer.hit_token == 2

    def test_a_late_decision_goes_back_to_the_token_that_completed_the_stop(self) -> None:
        # 'ab' may become 'abxyz' until the 'q': ids after 'ab' must not have been handed out.
        words = Words("a", "b", "x", "y", "q")
        detokenizer = IncrementalDetokenizer(words, stops=["ab", "abxyz"])
        feed(detokenizer, [0, 1, 2, 3])
        assert detokenizer.hit is None
        assert (detokenizer.num_tokens, detokenizer.num_released_tokens) == (4, 0)

        feed(detokenizer, [4])
        assert detokenizer.hit == StopHit("ab", 0)
        assert (detokenizer.num_tokens, detokenizer.hit_token, detokenizer.text) == (2, 1, "")

    def test_the_end_decides_for_a_stop_that_waited(self) -> None:
        words = Words("a", "b", "x")
        detokenizer = IncrementalDetokenizer(words, stops=["ab", "abxyz"])
        feed(detokenizer, words.ids)
        detokenizer.finish()

        assert (detokenizer.hit, detokenizer.num_tokens, detokenizer.text) == (StopHit("ab", 0), 2, "")

    def test_held_text_comes_out_at_an_end_by_length(self) -> None:
        # Bug kind 74.
        words = Words(*["abcd "] * 10)
        detokenizer = IncrementalDetokenizer(words, stops=["abcd " * 9 + "!"])
        assert feed(detokenizer, words.ids) == "abcd "
        detokenizer.finish()

        assert detokenizer.text == "abcd " * 10
        assert detokenizer.num_released_tokens == 10

    def test_text_is_held_and_released_in_whole_tokens(self) -> None:
        # Bug kind 79: holding by characters tore a marker token in two.
        words = Words("x", "<tool>", "y", "><<", "z")
        detokenizer = IncrementalDetokenizer(words, stops=[">>>"])
        pieces = []
        for i in words.ids:
            piece = feed(detokenizer, [i])
            pieces.append(piece)
            assert detokenizer.text == words(range(detokenizer.num_released_tokens))

        assert pieces == ["x", "", "<tool>y", "><<", "z"]

    def test_an_emoji_as_stop_is_matched_once_it_is_whole(self) -> None:
        # Bug kind 49.
        ids = list("hi 😀!".encode())
        detokenizer = IncrementalDetokenizer(decode_bytes, stops=["😀"])
        feed(detokenizer, ids)

        assert (detokenizer.text, detokenizer.hit_token) == ("hi ", 6)

    def test_a_stop_right_behind_half_a_character_is_found(self) -> None:
        ids = [*"😀".encode()[:2], *b" end", *b"more"]
        detokenizer = IncrementalDetokenizer(decode_bytes, stops=["end"])
        feed(detokenizer, ids)

        assert (detokenizer.text, detokenizer.hit_token) == (UNKNOWN + " ", 5)

    def test_tokens_after_a_hit_or_the_end_are_dropped(self) -> None:
        detokenizer = IncrementalDetokenizer(decode_bytes, stops=["b"])
        feed(detokenizer, b"abc")
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)

        ended = IncrementalDetokenizer(decode_bytes)
        feed(ended, b"ab")
        ended.finish()
        feed(ended, b"c")
        assert (ended.text, ended.num_tokens) == ("ab", 2)

    @pytest.mark.parametrize(("min_tokens", "last"), [(0, 1), (1, 1), (2, 4), (4, 4), (5, None)])
    def test_a_stop_ends_no_request_before_min_tokens(self, min_tokens: int, last: int | None) -> None:
        # Output index min_tokens is the first that may end it, as for EOS.
        words = Words("a", ".", "b", "c", ".")
        detokenizer = IncrementalDetokenizer(words, stops=["."], min_tokens=min_tokens)
        feed(detokenizer, words.ids)
        detokenizer.finish()

        assert detokenizer.hit_token == last
        assert detokenizer.text == words(range(5 if last is None else last))

    def test_a_stop_may_begin_before_min_tokens(self) -> None:
        words = Words("a", "EN", "D")
        detokenizer = IncrementalDetokenizer(words, stops=["END"], min_tokens=2)
        feed(detokenizer, words.ids)

        assert (detokenizer.text, detokenizer.hit_token) == ("a", 2)

    @settings(max_examples=400)
    @given(
        words=st.lists(st.text("ab😀", max_size=4), max_size=14),
        stops=st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=3),
        include=st.booleans(),
        min_tokens=st.integers(0, 6),
    )
    def test_equals_a_search_in_the_whole_text(
        self, words: list[str], stops: list[str], include: bool, min_tokens: int
    ) -> None:
        decode = Words(*words)
        detokenizer = IncrementalDetokenizer(decode, stops, include, min_tokens)
        released = taken = ""
        for i in decode.ids:
            taken += feed(detokenizer, [i])
            assert detokenizer.text.startswith(released)
            released = detokenizer.text
        detokenizer.finish()
        taken += detokenizer.take()

        ends = [len(decode(range(i + 1))) for i in decode.ids]
        whole = decode(decode.ids)
        early = ends[min(min_tokens, len(ends)) - 1] if min_tokens and ends else 0
        found = [
            (start, -len(stop))
            for stop in stops
            for start in range(len(whole))
            if whole.startswith(stop, start) and start + len(stop) > early
        ]
        assert taken == detokenizer.text
        if not found:
            assert (detokenizer.hit, detokenizer.text) == (None, whole)
            return
        start, length = min(found)
        last = next(i for i, end in enumerate(ends) if end >= start - length)
        assert detokenizer.text == whole[: start - length if include else start]
        assert detokenizer.hit_token == last
        assert detokenizer.num_tokens == last + 1

    @settings(max_examples=150)
    @given(text=TEXTS, stops=st.lists(st.sampled_from([*SNIPPETS, "lo", "o t", "本語"]), min_size=1, max_size=3))
    def test_finds_in_tokenized_text_what_find_finds(self, text: str, stops: list[str]) -> None:
        ids = byte_level().encode(text).ids
        detokenizer = IncrementalDetokenizer(decode_level, stops)
        feed(detokenizer, ids)
        detokenizer.finish()

        starts = [text.find(stop) for stop in stops if stop in text]
        assert detokenizer.text == text[: min(starts, default=len(text))]
