"""What real recurrent layers keep of rows and in snapshots is what a fresh prefill of the tokens leaves (I22, I23).

Tokens would tell of a wrong state, but a state that forgets soon tells late; so the tensors themselves are compared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.models.base import SlotState
from engine.models.loader import LoadedModel
from tests.changed_shapes import TWO_LAYERS, changed_shape
from tests.forward_driver import Text
from tests.slot_driver import SlotDriver

BLOCK = 4
PROMPTS = [[5, 6, 7, 1, 2, 3, 4, 5, 6], [1], [5, 6, 7, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4, 5, 6, 7], [2, 3]]
PARAMS = SamplingParams(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True, detokenize=False)
SERVING: dict[str, Any] = {
    "device": "inline",
    "mode": "legacy",  # nothing is pending between two iterations, so the host knows every token that was read
    "block_size": BLOCK,
    "num_blocks": 60,
    "max_requests": 3,
    "max_batch_tokens": 48,
    "max_sequence_length": 48,
    "prefix_caching": True,
    "debug_invariants": True,
}


@cache
def few_ids() -> LoadedModel:
    """So few that random heads foresee some; two Mamba2 layers, so that the second reads what the first makes."""
    layers = {**TWO_LAYERS, "hybrid_override_pattern": "M*M", "num_hidden_layers": 3}
    return changed_shape("tiny-hybrid", torch.float64, **layers, vocab_size=8)


def fresh(tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Convolution inputs and states of each recurrent layer, behind one forward over ``tokens``."""
    driver, text = SlotDriver(few_ids().model), Text(tokens)
    driver.forward([text])
    slot = driver.slot(text)
    return [(driver.caches[layer][0][slot], driver.caches[layer][1][slot]) for layer in recurrent_layers()]


def recurrent_layers() -> list[int]:
    return [at for at, state in enumerate(few_ids().model.cache_layout()) if isinstance(state, SlotState)]


def require_state(engine: Engine, slot: int, tokens: list[int], *, has_history: bool = True) -> None:
    for layer, (inputs, state) in zip(recurrent_layers(), fresh(tokens), strict=True):
        kept = engine.runner.caches[layer]
        torch.testing.assert_close(kept[1][slot], state, atol=1e-11, rtol=0.0)
        if has_history:
            torch.testing.assert_close(kept[0][slot], inputs, atol=1e-11, rtol=0.0)


def check_rows(engine: Engine) -> int:
    """Of every row; gives how many decoded."""
    table, config, decoded = engine.table, engine.config, 0
    for row, request in enumerate(table.requests[: table.num_live]):
        assert request is not None
        read, accepted = int(table.kv_len[row]), int(table.num_accepted[row])
        tokens = [*request.prompt_ids, *request.output_ids][:read]
        is_decode = read >= len(request.prompt_ids) + 1
        decoded += is_decode
        if engine.resolved.config.replays_states:
            behind = accepted + 1 if is_decode else 0  # tokens of the last forward, which enter with the next
            if read > behind:
                require_state(engine, int(table.state_slot[row]), tokens[: read - behind], has_history=False)
        else:
            require_state(engine, int(table.state_slot[row]) * config.decode_width + accepted, tokens)
    return decoded


def check_snapshots(engine: Engine) -> int:
    """Of every block of every row; gives how many were found."""
    cache, found = engine.prefix_cache, 0
    assert cache is not None
    assert cache.snapshots is not None
    for request in engine.table.live_requests():
        for depth, digest in enumerate(request.digests, 1):
            slot = cache.snapshots.find(digest)
            if slot is not None:
                has_history = not engine.resolved.config.replays_states
                require_state(engine, slot, list(request.prompt_ids[: depth * BLOCK]), has_history=has_history)
                found += 1
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill": True, "max_batch_tokens": 7},
        {"speculative_tokens": 2, "state_rewind": "stored"},
        {"speculative_tokens": 2, "state_rewind": "replayed"},
        {"speculative_tokens": 2, "state_rewind": "replayed", "chunked_prefill": True, "max_batch_tokens": 11},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "plain",
)
def test_states_behind_every_step_are_those_of_a_fresh_prefill(options: dict[str, Any]) -> None:
    decoded = snapshots = 0
    with Engine(few_ids(), EngineConfig(**{**SERVING, **options})) as engine:
        for number, prompt in enumerate(PROMPTS * 2):
            engine.add_request(prompt, PARAMS.replace(seed=number))
        while engine.has_unfinished():
            engine.step()
            decoded += check_rows(engine)
            snapshots += check_snapshots(engine)
        assert engine.counters.prefix_hit_tokens > 0
        if engine.config.speculative_tokens:
            assert 0 < engine.counters.drafts_accepted.total() < engine.counters.drafts_proposed.total()
    assert decoded > 20
    assert snapshots > 10
