"""The oracle's world on any device: one model for each, so that engines on the CPU devices share traced buckets."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.config import EngineConfig
from engine.device import Device, make_device
from engine.engine import Engine
from engine.models.loader import LoadedModel
from tests.oracle_reference import EOS, VOCAB
from tests.oracle_world import FaultyOracle, PieceTokenizer, World


@cache
def oracle_on(torch_device: torch.device) -> LoadedModel:
    """The oracle with a tokenizer, so that stop strings can be asked for."""
    return LoadedModel(
        model=FaultyOracle(0, device=torch_device),
        tokenizer=PieceTokenizer(),  # type: ignore[arg-type]
        name="oracle",
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        architecture="Oracle",
        config={},
    )


def oracle_world(device: str | Device, **options: Any) -> World:
    """An engine with invariants on: 8 rows, blocks of 4, sequences of 100; ``options`` override."""
    made = make_device(device) if isinstance(device, str) else device
    config: dict[str, Any] = {
        "device": made.kind,
        "block_size": 4,
        "num_blocks": 50,
        "max_requests": 8,
        "max_batch_tokens": 100,
        "max_sequence_length": 100,
        "debug_invariants": True,
    }
    return World(Engine(oracle_on(made.torch_device), EngineConfig(**{**config, **options}), device=made))
