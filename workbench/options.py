"""Engine options on the command line: every field of ``EngineConfig`` as a dashed flag, its docstring as help."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn, get_type_hints

from engine.config import EngineConfig
from engine.errors import ConfigError

_MORE_HELP = {
    "graphs": "A size is captured once for each mix of decode and prefill rows and, on the CPU devices, for each "
    "bucket of KV length, so N sizes are more than N captures; --no-graph-non-decode leaves the prefill mixes out."
}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error of a user's."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage; the caller prints ``message``."""
        raise UsageError(f"{message}{_meant(message)}; {self.prog} --help shows what it takes")

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        """Every flag it takes by now, and those still to be added."""
        return self._option_string_actions


class UsageError(Exception):
    """A command line that cannot be understood."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean '...'?`` with the nearest known name, or nothing."""
    near = get_close_matches(name, list(known))
    near.sort(key=lambda one: sorted(one) != sorted(name))  # swapped letters are the likelier slip
    return f"; did you mean {near[0]!r}?" if near else ""


def _meant(message: str) -> str:
    """The nearest of the choices that argparse lists after a wrong one."""
    found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    return did_you_mean(found[1], re.findall(r"[\w-]+", found[2])) if found else ""


def add_config_flags(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add ``--config`` and a flag a field; flags that are not given leave no trace in the result."""
    group = parser.add_argument_group("engine options", "fields of EngineConfig; flags win over the file")
    group.add_argument("--config", metavar="FILE.yaml", help="a mapping of the options below, names with underscores")
    hints, documents = get_type_hints(EngineConfig), field_documents(EngineConfig)
    for one in fields(EngineConfig):
        if one.name in without:
            continue
        flag = "--" + one.name.replace("_", "-")
        words = " ".join(filter(None, (documents[one.name], _MORE_HELP.get(one.name))))
        text = words.replace("%", "%%") + f" Default: {one.default}."
        kind: dict[str, Any] = {"metavar": "auto|N|N,N,..." if one.name == "graphs" else _metavar(hints[one.name])}
        if hints[one.name] is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag, dest=one.name, default=argparse.SUPPRESS, help=text, **kind)


def config_from(args: argparse.Namespace) -> EngineConfig:
    """The configuration that file and flags ask for.

    Raises:
        ConfigError: the file cannot be read, or a value does not fit; or several ranks are asked of a command that
            knows one.
    """
    config = _config_from(args)
    command = getattr(args, "name", "run")
    if config.has_ranks and command != "run":
        raise ConfigError(
            f"expert_parallel: {command} runs on one rank; of several, torchrun --nproc-per-node "
            f"{config.expert_parallel} -m workbench run --expert-parallel {config.expert_parallel} tells"
        )
    return config


def _config_from(args: argparse.Namespace) -> EngineConfig:
    hints = get_type_hints(EngineConfig)
    given = {one.name: getattr(args, one.name) for one in fields(EngineConfig) if hasattr(args, one.name)}
    flags = {name: _value(name, hints[name], text) for name, text in given.items()}
    if args.config is not None:
        return _from_file(args.config, flags)
    return EngineConfig.from_mapping(flags, source="flags")


def _from_file(path: str, flags: dict[str, Any]) -> EngineConfig:
    """The file with flags laid over it; an error that the file makes by itself names it."""
    try:
        return EngineConfig.from_yaml(path, **flags)
    except ConfigError as error:
        if path in str(error):
            raise
        try:
            EngineConfig.from_yaml(path)
        except ConfigError as alone:
            if str(alone) == str(error):
                raise type(error)(f"{path}: {error}") from error
        raise


def field_documents(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    found: dict[str, str] = {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(after.value.value).split()).replace("``", "")
    return found


def _value(name: str, hint: Any, text: str | bool) -> Any:
    """What a flag's text means; read here and not by argparse, whose errors name neither field nor expectation."""
    if isinstance(text, bool):
        return text
    kinds = getattr(hint, "__args__", (hint,))
    if type(None) in kinds and text.lower() == "none":
        return None
    if name == "graphs" and text.lower() == "auto":
        return "auto"
    if name == "graphs" and "," in text:
        return [_number(name, part, int) for part in text.split(",") if part]
    for kind in (int, float):
        if kind in kinds:
            return _number(name, text, kind)
    return text


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} must be {what}, got {text!r}") from None


def _metavar(hint: Any) -> str:
    kinds = getattr(hint, "__args__", (hint,))
    if all(isinstance(kind, str) for kind in kinds):  # the words of a Literal
        return "|".join(kinds)
    if int in kinds:
        return "N"
    return "X" if float in kinds else "NAME"
