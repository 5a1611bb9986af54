"""What pages say, on the thread that drives the session.

A kernel with subshells (ipykernel 7, JupyterLab 4.4) hands messages of widgets to whichever of its threads it likes:
a click may come on another one than cells and runs in the background, and on another loop. Sessions are driven by one
thread alone. So widgets pass what they hear on to the loop that made them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


def on_own_thread(function: Callable[..., None]) -> Callable[..., None]:
    """``function``, called on the thread that calls this: at once there, from others in a turn of its running loop.

    Without a loop, or once it is closed, at once and wherever it is called: then no run in the background can be met.
    """
    own, loop = threading.get_ident(), _running_loop()

    def call(*args: Any) -> None:
        if threading.get_ident() == own or loop is None or loop.is_closed():
            function(*args)
        else:
            loop.call_soon_threadsafe(function, *args)

    return call


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
