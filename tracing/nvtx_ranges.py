"""NVTX ranges for Nsight Systems, through the ``nvtx`` package, or nothing at all.

Event attributes are built once a name and pushed by the package's own C functions: about 45 ns a range
with no tool attached, against 450 ns for ``nvtx.push_range("name", ...)`` in the pinned 0.2.11, which also keeps
every payload it has seen in a cache without bound.
``torch.cuda.nvtx`` is never used: it raises on CPU builds of torch.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tracing.records import PHASE_COLOURS

NVTX_PIN = "0.2.11"
"""From 0.2.12 on the package asks a tool whether a domain is wanted, which Nsight Systems 2023.4 does not answer:
every range of a named domain is then dropped, in silence."""

INJECTION = "NVTX_INJECTION64_PATH"
"""The variable by which a tool is attached when the process starts; it cannot be attached later."""

DOMAIN = "engine"
CAPTURE = "capture"
"""Name and category of the range that ``nsys profile --capture-range=nvtx --nvtx-capture=capture@engine`` waits for."""

SESSION_SHIFT = 40
"""Payloads are ``session_id << 40 | iteration``: the plain iteration number for session 0."""

CATEGORY_OF_DETAIL = {
    "publish": "copy",
    "fetch_accepted": "copy",
    "fetch": "copy",
    "compact": "copy",
    "replay": "graph",
}
"""NVTX category of host spans inside a phase that enqueue a copy or replay a graph; other ones have ``detail``."""

Attributes = Any  # the package's EventAttributes; None when there is nothing to emit


class RangeSink(Protocol):
    """Where ranges go. Push and pop are for ranges inside one phase, start and end for those that cross yields."""

    def attributes(self, name: str, category: str, colour: str) -> Attributes:
        """Reusable attributes of all ranges of this name, or None: such ranges are not emitted."""
        ...

    def push(self, attributes: Attributes, payload: int) -> None:
        """Open a range on this thread."""
        ...

    def pop(self) -> None:
        """Close the range this thread opened last."""
        ...

    def start(self, attributes: Attributes, payload: int) -> Any:
        """Open a range that need not nest; returns what :meth:`end` takes."""
        ...

    def end(self, token: Any) -> None:
        """Close a started range."""
        ...

    def mark(self, attributes: Attributes, payload: int) -> None:
        """Emit a moment."""
        ...


class NoRanges:
    """Emits nothing. ``status`` says why."""

    def __init__(self, status: str = "off") -> None:
        self.status = status

    def attributes(self, name: str, category: str, colour: str) -> Attributes:
        """None: the recorder then skips every other call."""
        return None

    def push(self, attributes: Attributes, payload: int) -> None:
        """Nothing."""

    def pop(self) -> None:
        """Nothing."""

    def start(self, attributes: Attributes, payload: int) -> Any:
        """Nothing."""
        return None

    def end(self, token: Any) -> None:
        """Nothing."""

    def mark(self, attributes: Attributes, payload: int) -> None:
        """Nothing."""


class NvtxRanges:
    """Emits to the NVTX domain ``engine``.

    Args:
        package: The imported ``nvtx`` package (or one with the same surface).
        library: Its ``nvtx._lib``, whose functions take ready-made attributes.
            ``_lib`` is private: the version is pinned, and a test pushes through it.

    Raises:
        AttributeError: the package is not the pinned one.
    """

    def __init__(self, package: Any, library: Any) -> None:
        self._domain = package.get_domain(DOMAIN)
        self._handle = self._domain.handle
        self._make: Callable[..., Any] = library.EventAttributes
        self._push: Callable[[Any, Any], None] = library.push_range
        self._pop: Callable[[Any], None] = library.pop_range
        self._start: Callable[[Any, Any], Any] = library.start_range
        self._end: Callable[[Any], None] = library.end_range
        self._mark: Callable[[Any, Any], None] = library.mark
        self.is_recorded, self.status = attached_tool()

    def attributes(self, name: str, category: str, colour: str) -> Attributes:
        """Event attributes of this sink alone: the package's own are shared by all threads, payload included."""
        domain = self._domain
        return self._make(domain.get_registered_string(name), argb(colour), domain.get_category_id(category), None)

    def push(self, attributes: Attributes, payload: int) -> None:
        """Open a range on this thread."""
        attributes.payload = payload
        self._push(attributes, self._handle)

    def pop(self) -> None:
        """Close the range this thread opened last."""
        self._pop(self._handle)

    def start(self, attributes: Attributes, payload: int) -> Any:
        """Open a range that need not nest."""
        attributes.payload = payload
        return self._start(attributes, self._handle)

    def end(self, token: Any) -> None:
        """Close a started range."""
        self._end(token)

    def mark(self, attributes: Attributes, payload: int) -> None:
        """Emit a moment."""
        attributes.payload = payload
        self._mark(attributes, self._handle)


def argb(colour: str) -> int:
    """``#RRGGBB`` as an opaque 0xAARRGGBB integer."""
    return 0xFF000000 | int(colour.lstrip("#"), 16)


def colour_of(name: str, category: str) -> str:
    """The fixed colour of a range: its own if it names a phase, else its category's, else ``other``'s."""
    return PHASE_COLOURS.get(name) or PHASE_COLOURS.get(category) or PHASE_COLOURS["other"]


def attached_tool() -> tuple[bool, str]:
    """Whether a tool listens in this process, and a line about it. The first use of NVTX loads it: ask after that."""
    path = os.environ.get(INJECTION)
    if not path:
        return False, "no tool attached"
    if not _is_loaded(path):
        return False, f"no tool attached: {path}, which {INJECTION} names, was not loaded"
    return True, f"tool attached: {path}"


def _is_loaded(library: str) -> bool:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # a system that does not say
    return str(Path(library).resolve()) in maps


def open_ranges() -> NvtxRanges | NoRanges:
    """The sink this process can have: none if ``NVTX_DISABLE`` is set, or the pinned package is not there.

    Its ``status`` says which. Warns if a tool is attached that will see nothing because of the package's version.
    """
    if os.environ.get("NVTX_DISABLE"):
        return NoRanges("NVTX_DISABLE is set")
    try:
        package = importlib.import_module("nvtx")
        library = importlib.import_module("nvtx._lib")
    except ImportError:
        return NoRanges("nvtx is not installed")
    try:
        return NvtxRanges(package, library)
    except AttributeError as error:
        status = f"off: this nvtx is not {NVTX_PIN} (it lacks {error.name!r}); pip install nvtx=={NVTX_PIN}"
        if os.environ.get(INJECTION):
            warnings.warn(f"no NVTX ranges: {status}", RuntimeWarning, stacklevel=2)
        return NoRanges(status)
