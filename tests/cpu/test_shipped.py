"""The model that comes with the package: small, right, and worth drafting for."""

from __future__ import annotations

import inspect
import lzma
import math
import re
import textwrap
from functools import cache

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.loader import SHIPPED, LoadedModel, load_model
from engine.request import RequestOutput
from tests.teacher import check_against_transformers
from tools.train_shipped.corpus import library_corpus

CODE = inspect.getsource(textwrap)
PROMPTS = [CODE[:60], CODE[1000:1300], "def add(a, b):\n", "\N{SNOWMAN} = 1\n"]
LIMIT_BYTES = 6_000_000


@cache
def loaded(dtype: torch.dtype) -> LoadedModel:
    return load_model("shipped", dtype=dtype)


def serve(dtype: torch.dtype, *, tokens: int = 40, **options: object) -> tuple[list[RequestOutput], Engine]:
    limits = {"device": "inline", "max_requests": 4, "max_batch_tokens": 512, "max_sequence_length": 512}
    engine = Engine(loaded(dtype), EngineConfig(**{**limits, **options}))  # type: ignore[arg-type]
    params = [SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0, ignore_eos=True)] * 2
    params += [SamplingParams(max_tokens=tokens, temperature=0.8, seed=i, ignore_eos=True) for i in range(2)]
    return engine.generate(PROMPTS, params, progress=False), engine


class TestFolder:
    def test_is_small_enough_to_travel_with_the_package(self) -> None:
        assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= LIMIT_BYTES

    def test_its_card_says_that_it_beats_xz_and_that_drafts_are_accepted(self) -> None:
        card = (SHIPPED / "README.md").read_text(encoding="utf-8")

        bits = {name: float(value) for name, value in re.findall(r"^\| (this model|xz -9) \| ([\d.]+) \|", card, re.M)}
        accepted = re.search(r"held-out text, teacher-forced \| ([\d.]+)", card)

        assert bits["this model"] < bits["xz -9"]
        assert accepted is not None
        assert float(accepted[1]) >= 0.5

    def test_reads_back_every_text(self) -> None:
        tokenizer = loaded(torch.float32).tokenizer
        assert tokenizer is not None
        for text in (CODE[:500], "tab\tcaf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}\r\n", "  two  "):
            assert tokenizer.decode(tokenizer.encode(text)) == text


class TestText:
    def test_held_out_code_takes_fewer_bits_than_xz_makes_of_all_of_it(self) -> None:
        """Windows from anywhere, each byte behind 1,024 others at least; the card has all of the text behind 3,072."""
        text = b"".join(library_corpus().held_out)
        windows = [text[first : first + 3072] for first in range(0, len(text) - 3072, len(text) // 10)]
        limits = {"max_requests": 1, "max_batch_tokens": 4096, "max_sequence_length": 4096}
        ask = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        nats: list[float] = []

        with Engine(loaded(torch.float32), EngineConfig(device="inline", **limits)) as engine:
            for window in windows:  # a byte is its own id
                (output,) = engine.generate([list(window)], ask, progress=False)
                assert output.prompt_logprobs is not None
                rows = zip(output.prompt_logprobs[1024:], window[1024:], strict=True)
                nats += [-row[byte] for row, byte in rows if row is not None]

        bits = sum(nats) / math.log(2) / len(nats)
        assert len(nats) > 20_000
        assert bits < 8 * len(lzma.compress(text, preset=9)) / len(text)


class TestAnswers:
    def test_transformers_says_the_same(self) -> None:
        outputs, _ = serve(torch.float32, tokens=24)

        check_against_transformers(SHIPPED, outputs[:2])

    @pytest.mark.parametrize(
        "options",
        [
            {"mode": "legacy"},
            {"speculative_tokens": 1},
            {"speculative_tokens": 2},
            {"speculative_tokens": 2, "mode": "legacy"},
            {"speculative_tokens": 2, "late_rewind": True, "prefix_caching": True},
            {"speculative_tokens": 2, "prefix_caching": True, "chunked_prefill": True, "max_batch_tokens": 48},
            {"state_rewind": "replayed", "speculative_tokens": 2, "chunked_prefill": True, "max_batch_tokens": 48},
        ],
        ids=lambda options: "-".join(map(str, options.values())),
    )
    def test_no_option_changes_a_token(self, options: dict[str, object]) -> None:
        expected, _ = serve(torch.float64)

        found, _ = serve(torch.float64, **options)

        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


class TestDrafts:
    def test_of_the_first_drafts_half_at_least_are_accepted(self) -> None:
        config = EngineConfig(device="inline", speculative_tokens=2, max_requests=4, max_sequence_length=1024)
        engine = Engine(loaded(torch.float32), config)
        prompts = [CODE[first : first + 300] for first in (0, 2000, 5000, 9000)]

        engine.generate(prompts, SamplingParams(max_tokens=80, temperature=0.0), progress=False)

        counters = engine.counters
        assert counters.drafts_accepted[0] >= 0.5 * counters.drafts_proposed[0]
        assert counters.drafts_accepted[1] >= 0.5 * counters.drafts_accepted[0]


class TestBackends:
    def test_a_backend_that_needs_a_gpu_is_refused_without_one(self) -> None:
        config = EngineConfig(device="inline", ssm_backend="triton", max_requests=2, max_sequence_length=64)

        with pytest.raises(ConfigError, match="ssm backend 'triton' needs device='cuda'"):
            Engine.from_pretrained("shipped", config, progress=False)
