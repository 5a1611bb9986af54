"""Progress on standard error for what takes seconds."""

from __future__ import annotations

from tqdm import tqdm


class CaptureBar:
    """A progress bar with the memory taken so far, on a terminal only, from the first report to the last."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __call__(self, done: int, total: int, memory_bytes: int) -> None:
        """Report ``done`` of ``total`` graphs captured, which took so much memory."""
        if self._bar is None:
            self._bar = tqdm(total=total, desc="capture", unit="graph", disable=None)  # None: only on a terminal
        self._bar.set_postfix_str(f"{memory_bytes / 2**20:,.0f} MiB", refresh=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
            self._bar = None
