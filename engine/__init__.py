"""A dynamic-batching LLM engine that can be driven one phase at a time.

Names are loaded when first used: ``import engine`` alone brings in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.admission import AdmissionPolicy as AdmissionPolicy
    from engine.config import EngineConfig as EngineConfig
    from engine.engine import Engine as Engine
    from engine.errors import CheckpointError as CheckpointError
    from engine.errors import ConfigError as ConfigError
    from engine.errors import EngineError as EngineError
    from engine.errors import EnginePausedError as EnginePausedError
    from engine.errors import IterationFailedError as IterationFailedError
    from engine.errors import MidIterationError as MidIterationError
    from engine.errors import PolicyError as PolicyError
    from engine.errors import RankError as RankError
    from engine.errors import RequestError as RequestError
    from engine.models.registry import register_model as register_model
    from engine.phases import Order as Order
    from engine.phases import Phase as Phase
    from engine.phases import Reason as Reason
    from engine.policy import OrderPolicy as OrderPolicy
    from engine.policy import OrderState as OrderState
    from engine.policy import never_overlap as never_overlap
    from engine.policy import prefer_overlap as prefer_overlap
    from engine.request import RequestOutput as RequestOutput
    from engine.request import SamplingParams as SamplingParams

_HOMES = {
    "AdmissionPolicy": "engine.admission",
    "EngineConfig": "engine.config",
    "Engine": "engine.engine",
    "CheckpointError": "engine.errors",
    "ConfigError": "engine.errors",
    "EngineError": "engine.errors",
    "EnginePausedError": "engine.errors",
    "IterationFailedError": "engine.errors",
    "MidIterationError": "engine.errors",
    "PolicyError": "engine.errors",
    "RankError": "engine.errors",
    "RequestError": "engine.errors",
    "register_model": "engine.models.registry",
    "Order": "engine.phases",
    "Phase": "engine.phases",
    "Reason": "engine.phases",
    "OrderPolicy": "engine.policy",
    "OrderState": "engine.policy",
    "never_overlap": "engine.policy",
    "prefer_overlap": "engine.policy",
    "RequestOutput": "engine.request",
    "SamplingParams": "engine.request",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
