"""Legs of a comparison: one way each to run the same workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.admission import AdmissionPolicy, first_come_first_served
from engine.config import EngineConfig
from engine.graphs import GraphListPolicy, captured_by_default
from engine.policy import OrderPolicy, never_overlap, prefer_overlap
from workbench.loading import session_config
from workbench.workloads import WorkloadError


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One way to run the workload."""

    name: str
    """Heads its column."""
    mode: str
    policy: OrderPolicy = prefer_overlap
    admission: AdmissionPolicy = first_come_first_served
    graph_list: GraphListPolicy = captured_by_default
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Engine options of this leg alone."""


LEGS: dict[str, Leg] = {
    "legacy": Leg(name="legacy", mode="legacy"),
    "no-overlap": Leg(name="async without overlap", mode="async", policy=never_overlap),
    "async": Leg(name="async", mode="async"),
}
"""Ready-made legs by the name that the command line takes: re-ordering and overlap can be told apart."""

LegLike = str | Leg | tuple[str, EngineConfig | Mapping[str, Any]]
"""A name of :data:`LEGS`, a leg, or a name with a whole configuration or with the options that it changes."""

_OF_THE_MODEL = ("device", "dtype", "attention_backend")
"""Options that the loaded model was made for."""
_OF_THE_POOL = ("num_blocks", "kv_cache_gb", "block_size")
"""Options by which a leg asks for a KV pool of its own."""


def chosen_legs(
    legs: Sequence[LegLike] | Mapping[str, EngineConfig | Mapping[str, Any]], base: EngineConfig
) -> list[Leg]:
    """The legs that were asked for.

    Args:
        legs: A mapping is its pairs of name and configuration.
        base: Options of all legs; a pair that names no mode has its mode.

    Raises:
        WorkloadError: a leg is unknown or no leg, two share a name, or there are none.
    """
    chosen = [_leg(leg, base) for leg in (legs.items() if isinstance(legs, Mapping) else legs)]
    if not chosen or len({leg.name for leg in chosen}) != len(chosen):
        names = ", ".join(leg.name for leg in chosen) or "none"
        raise WorkloadError(f"legs must be at least one, each with a name of its own; got {names}")
    return chosen


def _leg(leg: LegLike, base: EngineConfig) -> Leg:
    match leg:
        case Leg():
            return leg
        case str():
            return _named(leg)
        case (str(name), EngineConfig() as config):
            common = base.to_dict()
            changes = {key: value for key, value in config.to_dict().items() if value != common[key]}
            return Leg(name=name, mode=changes.pop("mode", base.mode), changes=changes)
        case (str(name), Mapping() as options):
            changes = dict(options)
            return Leg(name=name, mode=changes.pop("mode", base.mode), changes=changes)
    raise WorkloadError(f"a leg is a name, a Leg, or a name with a configuration or options; got {leg!r}")


def _named(name: str) -> Leg:
    for key, known in LEGS.items():
        if name in (key, known.name):
            return known
    raise WorkloadError(f"leg {name!r} is unknown; known are {', '.join(LEGS)}")


def leg_config(leg: Leg, base: EngineConfig, num_blocks: int | None) -> EngineConfig:
    """The configuration of a leg.

    Args:
        leg: Which.
        base: Options of all legs.
        num_blocks: Of the first leg's pool; a leg that asks for no pool of its own gets as many. None: it is the first.

    Raises:
        ConfigError: an option is unknown or does not fit.
        WorkloadError: the leg wants another model than the one all share.
    """
    config = session_config(base, leg.mode, leg.changes)
    unshared = [name for name in _OF_THE_MODEL if getattr(config, name) != getattr(base, name)]
    if unshared:
        raise WorkloadError(f"leg {leg.name!r} changes {', '.join(unshared)}, but all legs share one loaded model")
    is_free = (
        base.num_blocks is None and base.kv_cache_gb is None and not any(name in leg.changes for name in _OF_THE_POOL)
    )
    return config.replace(num_blocks=num_blocks) if is_free and num_blocks is not None else config
