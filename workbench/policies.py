"""The three things a researcher may decide in an engine's stead, held together so that a run can tell which it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from engine.admission import AdmissionPolicy, first_come_first_served
from engine.graphs import GraphListPolicy, captured_by_default
from engine.policy import OrderPolicy, prefer_overlap


def policy_name(policy: Any) -> str:
    """The name of its class; of a dataclass its text, which tells its parameters too."""
    return repr(policy) if is_dataclass(policy) else type(policy).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """Of one session."""

    order: OrderPolicy = prefer_overlap
    admission: AdmissionPolicy = first_come_first_served
    graph_list: GraphListPolicy = captured_by_default

    def to_dict(self) -> dict[str, str]:
        """Their names, under the keys that a recorded configuration has for them."""
        return {
            "order_policy": policy_name(self.order),
            "admission_policy": policy_name(self.admission),
            "graph_list_policy": policy_name(self.graph_list),
        }


DEFAULTS: Mapping[str, str] = Policies().to_dict()
"""What a run had that was recorded before policies were."""
