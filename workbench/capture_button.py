"""A button that brackets iterations for a profiler which waits for the range ``capture``."""

from __future__ import annotations

from typing import Any

from engine.errors import EngineError
from workbench.own_thread import on_own_thread
from workbench.session import Session


class CaptureButton:
    """Shows what ``session.capture(n)`` did in a line of its own; ``widget`` is what a notebook displays."""

    def __init__(self, session: Session, n: int) -> None:
        import ipywidgets

        self._session = session
        self._number = ipywidgets.BoundedIntText(value=n, min=1, max=1_000_000, description="iterations")
        self._button = ipywidgets.Button(description="Capture", icon="circle", tooltip="session.capture(iterations)")
        self._line = ipywidgets.HTML(session.recorder.nvtx_status)
        self._button.on_click(on_own_thread(lambda button: self.press()))
        self.widget: Any = ipywidgets.HBox([self._number, self._button, self._line])

    def press(self) -> None:
        """Capture as many iterations as the field says, and tell how it went."""
        before = self._session.engine.controller.next_index
        try:
            done = self._session.capture(self._number.value)
        except EngineError as error:
            self._line.value = f"not captured: {error}"
            return
        after = self._session.engine.controller.next_index
        if after == before:
            self._line.value = "nothing is left to do: submit requests first"
            return
        self._line.value = f"captured iterations {before} to {after - 1}; {len(done)} requests ended"
