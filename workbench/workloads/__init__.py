"""Workloads: what is asked of the engine and when, made from one line of text, from a table, or read from a file.

``workload`` says what one is, ``kinds`` how text names one; ``made``, ``traces`` and ``request_file`` hold the kinds.
From a trace's rows to requests: ``rows`` reads them, ``columns`` what they say, ``shaping`` cuts and times, ``records``
puts it together, ``prompts`` makes the tokens. A further kind is one function given to :func:`register_workload`.
"""

from workbench.workloads import made, request_file, traces  # noqa: F401 (they register their kinds)
from workbench.workloads.kinds import (
    WorkloadKind,
    WorkloadOptions,
    as_workload,
    check_workload,
    known_workloads,
    parse_workload,
    register_workload,
)
from workbench.workloads.prompts import SyntheticPrompt
from workbench.workloads.shaping import Shaping
from workbench.workloads.workload import Prompt, RequestSpec, Workload, WorkloadError

__all__ = [
    "Prompt",
    "RequestSpec",
    "Shaping",
    "SyntheticPrompt",
    "Workload",
    "WorkloadError",
    "WorkloadKind",
    "WorkloadOptions",
    "as_workload",
    "check_workload",
    "known_workloads",
    "parse_workload",
    "register_workload",
]
