"""Drives the engine from a notebook, a terminal or a test, and compares its modes.

Names are loaded when first used: ``import workbench`` alone brings in neither torch nor a plot.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.border_view import StepBorders as StepBorders
    from workbench.border_view import step_borders as step_borders
    from workbench.breakpoints import Breakpoint as Breakpoint
    from workbench.cluster import Cluster as Cluster
    from workbench.cluster import ClusterError as ClusterError
    from workbench.comparison import Comparison as Comparison
    from workbench.comparison import compare as compare
    from workbench.events import Event as Event
    from workbench.figures import Figure as Figure
    from workbench.figures import make_figure as make_figure
    from workbench.legs import Leg as Leg
    from workbench.replays import Replay as Replay
    from workbench.replays import ReplayError as ReplayError
    from workbench.report import RunView as RunView
    from workbench.report import write_report as write_report
    from workbench.saved_comparison import compare_saved as compare_saved
    from workbench.saved_runs import load_run as load_run
    from workbench.session import Session as Session
    from workbench.session import SessionError as SessionError
    from workbench.snapshot import Snapshot as Snapshot
    from workbench.stops import RunOutcome as RunOutcome
    from workbench.stops import Stop as Stop
    from workbench.stops import StopCause as StopCause
    from workbench.workloads import RequestSpec as RequestSpec
    from workbench.workloads import Workload as Workload
    from workbench.workloads import parse_workload as parse_workload
    from workbench.workloads import register_workload as register_workload

_HOMES = {
    "StepBorders": "workbench.border_view",
    "step_borders": "workbench.border_view",
    "Cluster": "workbench.cluster",
    "ClusterError": "workbench.cluster",
    "Comparison": "workbench.comparison",
    "compare": "workbench.comparison",
    "compare_saved": "workbench.saved_comparison",
    "Leg": "workbench.legs",
    "Figure": "workbench.figures",
    "make_figure": "workbench.figures",
    "RunView": "workbench.report",
    "write_report": "workbench.report",
    "load_run": "workbench.saved_runs",
    "Session": "workbench.session",
    "SessionError": "workbench.session",
    "Snapshot": "workbench.snapshot",
    "RequestSpec": "workbench.workloads",
    "Workload": "workbench.workloads",
    "parse_workload": "workbench.workloads",
    "register_workload": "workbench.workloads",
    "Breakpoint": "workbench.breakpoints",
    "Event": "workbench.events",
    "Replay": "workbench.replays",
    "ReplayError": "workbench.replays",
    "RunOutcome": "workbench.stops",
    "Stop": "workbench.stops",
    "StopCause": "workbench.stops",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
