"""Options: defaults, refusals that name the field, files and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError, EngineConfig
from engine.policy import check_policy

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "overlap"}, "'async' or 'legacy'"),
    ({"device": "tpu"}, "device"),
    ({"dtype": "int8"}, "dtype"),
    ({"block_size": 0}, "block_size"),
    ({"block_size": True}, "block_size"),
    ({"max_requests": 0}, "max_requests"),
    ({"max_batch_tokens": 10, "max_requests": 64}, "max_batch_tokens"),
    ({"num_blocks": 0}, "num_blocks"),
    ({"num_blocks": 8, "kv_cache_gb": 1.0}, "num_blocks and kv_cache_gb"),
    ({"kv_cache_gb": 0.0}, "kv_cache_gb"),
    ({"kv_cache_gb": float("nan")}, "kv_cache_gb"),
    ({"graphs": -2}, "graphs"),
    ({"graphs": True}, "graphs"),
    ({"graphs": []}, "graphs"),
    ({"graphs": [4, 0]}, "graphs"),
    ({"graph_distribution": "random"}, "graph_distribution"),
    ({"sampling_backend": "numpy"}, "sampling_backend"),
    ({"attention_backend": "magic"}, "attention_backend"),
    ({"logprobs_mode": "both"}, "logprobs_mode"),
    ({"eviction_policy": "fifo"}, "eviction_policy must be one of lru, ref_zero"),
    ({"prefix_caching": 1}, "prefix_caching"),
    ({"capacity_policy": "best"}, "capacity_policy must be one of guaranteed_no_evict, max_utilization"),
    ({"suspend_mode": "discard"}, "suspend_mode must be one of None, persist, offload, recompute; got 'discard'"),
    ({"routing_replay": "both", "mode": "legacy"}, "routing_replay must be one of None, record, replay; got 'both'"),
    ({"routing_replay": "record"}, "routing_replay='record' needs mode='legacy', got mode='async'"),
    ({"op_sleep_s": -1.0}, "op_sleep_s"),
    ({"op_sleep_s": 0.1, "device": "cuda"}, "op_sleep_s"),
]


class TestEngineConfig:
    def test_defaults_to_async_on_the_thread_device(self) -> None:
        config = EngineConfig()

        assert (config.mode, config.device, config.block_size) == ("async", "cpu", 16)

    @pytest.mark.parametrize(("options", "named"), REFUSED)
    def test_refuses_what_cannot_work_and_names_it(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            EngineConfig(**options)

    def test_a_refused_mode_names_both(self) -> None:
        with pytest.raises(ConfigError, match="'async' or 'legacy', got 'sync'"):
            EngineConfig(mode="sync")  # type: ignore[arg-type]

    def test_reads_a_file_and_lets_overrides_win(self, tmp_path: Path) -> None:
        path = tmp_path / "engine.yaml"
        path.write_text("mode: legacy\nblock_size: 8\ngraphs: [1, 2, 4]\n")

        config = EngineConfig.from_yaml(path, block_size=32)

        assert (config.mode, config.block_size, config.graphs) == ("legacy", 32, (1, 2, 4))

    @pytest.mark.parametrize(
        ("text", "named"),
        [("modes: legacy", "did you mean 'mode'"), ("- 1", "mapping"), ("a: [", "not YAML"), ("zzz: 1", "'zzz'")],
    )
    def test_a_wrong_file_is_one_clear_line(self, tmp_path: Path, text: str, named: str) -> None:
        path = tmp_path / "engine.yaml"
        path.write_text(text)

        with pytest.raises(ConfigError, match=named) as caught:
            EngineConfig.from_yaml(path)

        assert "\n" not in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
            EngineConfig.from_yaml(tmp_path / "nowhere.yaml")

    def test_survives_the_way_through_plain_values(self) -> None:
        config = EngineConfig(mode="legacy", graphs=[1, 8], num_blocks=12)

        assert EngineConfig.from_mapping(config.to_dict()) == config


class TestPolicies:
    @pytest.mark.parametrize(
        ("policy", "told"),
        [(object(), "method choose"), (type("Mine", (), {"choose": lambda self, state: None}), "write Mine")],
    )
    def test_what_is_no_policy_is_refused_at_once(self, policy: Any, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            check_policy(policy)
