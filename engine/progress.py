"""Progress on standard error for what takes seconds."""

from __future__ import annotations

from tqdm import tqdm


class CaptureBar:
    """A progress bar, on a terminal only, that appears at the first report and closes at the last."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Report ``done`` of ``total`` graphs captured."""
        if self._bar is None:
            self._bar = tqdm(total=total, desc="capture", unit="graph", disable=None)  # None: only on a terminal
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
            self._bar = None
