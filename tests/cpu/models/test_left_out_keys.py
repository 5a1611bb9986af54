"""A key that a file leaves out, or holds as null, means what it means to transformers, or is asked for by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.models.decoder_config import DecoderConfig
from engine.models.hybrid_families import FAMILIES as HYBRIDS
from engine.models.hybrid_families import read_hybrid
from tests.checkpoints import TINY
from tests.cpu.models.test_hybrid_families import (
    BAMBA,
    BAMBA_KEYS,
    GRANITE,
    GRANITE_KEYS,
    MAMBA2,
    MAMBA2_KEYS,
    NEMOTRON,
    NEMOTRON_KEYS,
)
from tests.cpu.models.test_moe_families import GLM4, MIXTRAL, QWEN2, QWEN3

HEADS = 32
"""What ``num_key_value_heads`` may be taken for divides it."""
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    **dict([MIXTRAL, QWEN2, QWEN3, GLM4]),
    MAMBA2: MAMBA2_KEYS,
    BAMBA: BAMBA_KEYS,
    NEMOTRON: {**NEMOTRON_KEYS, "num_nextn_predict_layers": 1},
    GRANITE: GRANITE_KEYS,
}
ASKED_FOR = {"layers_block_type": "hybrid_override_pattern", "n_routed_experts": "num_local_experts"}
"""By another name than the one that is left out."""
OTHERWISE = {"num_nextn_predict_layers"}
"""Draft heads that a file does not tell of are left out, where transformers, which runs none, assumes one."""


def read(config: dict[str, Any]) -> Any:
    given = json.loads(json.dumps(config), object_hook=lambda d: float(d["__float__"]) if "__float__" in d else d)
    return read_hybrid(given) if given["architectures"][0] in HYBRIDS else DecoderConfig.from_checkpoint(given)


def read_or_refused(config: dict[str, Any]) -> Any:
    """What is read, or why nothing is."""
    try:
        return read(config)
    except CheckpointError as error:
        return str(error)


def as_transformers_has_it(architecture: str, keys: dict[str, Any]) -> dict[str, Any] | None:
    """Every key of the class, defaults filled in; None where it refuses ``keys``."""
    import transformers

    cls = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    fresh = json.loads(json.dumps(keys), object_hook=lambda d: float(d["__float__"]) if "__float__" in d else d)
    for name in ("architectures", "model_type"):
        fresh.pop(name, None)
    try:
        filled = json.loads(cls(**fresh).to_json_string(use_diff=False))
    except Exception:  # whatever its validators raise; then there is nothing to be equal to
        return None
    return {**filled, "architectures": [architecture]}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_that_is_left_out_or_null_is_what_transformers_takes_it_for(architecture: str) -> None:
    whole = as_transformers_has_it(architecture, {**TINY, "num_attention_heads": HEADS, **FAMILIES[architecture]})
    assert whole is not None
    compared = 0
    for key in sorted(whole.keys() - {"architectures", "model_type", *OTHERWISE}):
        for has_null in (False, True):
            keys = {**whole, key: None} if has_null else {name: one for name, one in whole.items() if name != key}
            expected = as_transformers_has_it(architecture, keys)
            if expected is None or (has_null and expected.get(key) is None):
                continue
            found = read_or_refused(keys)
            if isinstance(found, str):
                assert any(name in found for name in (key, ASKED_FOR.get(key, key))), (key, found)
                continue
            assert found == read(expected), (key, has_null)
            compared += 1
    assert compared > 20
