"""Engine options on the command line, in files and in Python: the same fields, the same defaults."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.unit.workbench.worlds import oracle
from workbench.options import OneLineParser, UsageError, add_config_flags, config_from, field_documents
from workbench.session import Session


def parse(*argv: str) -> EngineConfig:
    parser = OneLineParser(prog="workbench run", allow_abbrev=False)
    add_config_flags(parser)
    return config_from(parser.parse_args(list(argv)))


def write(folder: Path, text: str) -> str:
    path = folder / "engine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


class TestDefaults:
    def test_mode_is_async_in_python_on_the_command_line_and_in_a_file(self, tmp_path: Path) -> None:
        with Session(oracle(), device="inline", num_blocks=8) as session:
            assert session.mode == "async"
        assert EngineConfig().mode == "async"
        assert parse().mode == "async"
        assert parse("--config", write(tmp_path, "max_requests: 8\n")).mode == "async"

    def test_no_flags_give_the_defaults(self) -> None:
        assert parse() == EngineConfig()


class TestPrecedence:
    def test_a_flag_wins_over_the_file_and_the_file_over_the_default(self, tmp_path: Path) -> None:
        path = write(tmp_path, "mode: legacy\nmax_requests: 8\nseed: 5\n")

        config = parse("--config", path, "--max-requests", "4")

        assert (config.mode, config.max_requests, config.seed) == ("legacy", 4, 5)
        assert config.block_size == EngineConfig().block_size

    def test_a_flag_can_put_a_default_back(self, tmp_path: Path) -> None:
        path = write(tmp_path, "graph_non_decode: false\nnum_blocks: 9\n")

        config = parse("--config", path, "--graph-non-decode", "--num-blocks", "none")

        assert config.graph_non_decode
        assert config.num_blocks is None


class TestFlags:
    def test_every_field_has_one_with_its_docstring(self) -> None:
        parser = OneLineParser(prog="p")
        add_config_flags(parser)

        text = " ".join(parser.format_help().split())
        for one in fields(EngineConfig):
            assert "--" + one.name.replace("_", "-") in text
        assert "Tokens of one KV block." in text
        assert all(field_documents(EngineConfig)[one.name] for one in fields(EngineConfig))

    def test_graphs_takes_a_list_and_says_what_a_count_costs(self) -> None:
        parser = OneLineParser(prog="p")
        add_config_flags(parser)

        text = " ".join(parser.format_help().split())
        assert "--graphs auto|N|N,N,... " in text
        assert "captured once for each mix of decode and prefill rows" in text

    @pytest.mark.parametrize(
        ("argv", "name", "value"),
        [
            (["--graphs", "1,2,4"], "graphs", (1, 2, 4)),
            (["--graphs", "-1"], "graphs", -1),
            (["--graphs", "none"], "graphs", None),
            (["--op-sleep-s", "0.5"], "op_sleep_s", 0.5),
            (["--kv-cache-gb", "0.5"], "kv_cache_gb", 0.5),
            (["--no-graph-non-decode"], "graph_non_decode", False),
            (["--dtype", "float64"], "dtype", "float64"),
            (["--suspend-mode", "offload"], "suspend_mode", "offload"),
            (["--suspend-mode", "none"], "suspend_mode", None),
        ],
    )
    def test_read_their_values(self, argv: list[str], name: str, value: object) -> None:
        assert getattr(parse(*argv), name) == value

    def test_a_field_may_be_left_out(self) -> None:
        parser = OneLineParser(prog="p", allow_abbrev=False)
        add_config_flags(parser, without=("mode",))

        with pytest.raises(UsageError, match="unrecognized arguments: --mode"):
            parser.parse_args(["--mode", "legacy"])


class TestBadValues:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--mode", "turbo"], "mode must be 'async' or 'legacy', got 'turbo'"),
            (["--max-requests", "many"], "max_requests must be a whole number, got 'many'"),
            (["--graphs", "1,x"], "graphs must be a whole number, got 'x'"),
            (["--op-sleep-s", "long"], "op_sleep_s must be a number, got 'long'"),
            (["--max-requests", "0"], "max_requests must be a positive whole number, got 0"),
            (["--rank-timeout-s", "0"], "rank_timeout_s must be above 0, got 0"),
        ],
    )
    def test_name_the_field_and_what_was_expected(self, argv: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse(*argv)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("max_request: 3\n", "did you mean 'max_requests'"),
            ("mode: turbo\n", "'async' or 'legacy'"),
            ("- 1\n", "must hold a mapping"),
            ("a: [\n", "is not YAML"),
        ],
    )
    def test_in_a_file_are_refused_alike(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse("--config", write(tmp_path, text))

    def test_a_bad_value_in_a_file_names_the_file_and_one_in_a_flag_does_not(self, tmp_path: Path) -> None:
        path = write(tmp_path, "max_requests: many\n")
        with pytest.raises(ConfigError, match=r"engine.yaml: max_requests must be a positive whole number, got 'many'"):
            parse("--config", path)
        with pytest.raises(ConfigError, match=r"^seed"):
            parse("--config", write(tmp_path, "mode: legacy\n"), "--seed", "x")
        with pytest.raises(ConfigError, match=r"^mode must be"):
            parse("--config", write(tmp_path, "max_requests: 4\n"), "--mode", "turbo")
        with pytest.raises(ConfigError, match=r"engine.yaml: routing_replay='record' needs mode='legacy'"):
            parse("--config", write(tmp_path, "routing_replay: record\n"))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot read config file .*none.yaml"):
            parse("--config", str(tmp_path / "none.yaml"))


class TestOneLineParser:
    def test_raises_one_line_that_points_to_the_help(self) -> None:
        parser = OneLineParser(prog="workbench run")
        parser.add_argument("--n", type=int)

        with pytest.raises(UsageError, match=r"^argument --n: invalid int value: 'x'; workbench run --help"):
            parser.parse_args(["--n", "x"])

    def test_is_what_argparse_expects_of_a_parser(self) -> None:
        assert issubclass(OneLineParser, argparse.ArgumentParser)
