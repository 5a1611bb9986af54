"""What showing a panel costs a run, in a kernel whose messages are read and drawn by nobody.

    python -m benchmarks.panel_cost --model oracle

In ``benchmarks.ui_panel`` browser and server work on the same cores as the engine and its device; here only the kernel
does, and a client that reads what it sends. Needs the extra notebook.
"""

from __future__ import annotations

import argparse
import ast
import os
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

_ROOT = Path(__file__).resolve().parents[1]
_MAKE = """
import asyncio
from benchmarks.panel_kernel import Bench
bench = Bench({model!r})
bench.panel._repr_mimebundle_()
None
"""
_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="oracle", choices=["oracle", "shape:tiny"])
    parser.add_argument("--pairs", type=int, default=8, help="runs with and without a panel, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of them")
    options = parser.parse_args()
    for name, value in measured(options.model, options.pairs, options.seconds).items():
        print(f"{name:<16}{value:10,.3f}")


def measured(model: str, pairs: int, seconds: float) -> dict[str, float]:
    """Tokens a second with a panel over those without, and what redraws took; and messages a second of the pairs."""
    os.environ["PYTHONPATH"] = str(_ROOT)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=_TIMEOUT_S)
        run(client, _MAKE.format(model=model))
        begin_s = time.monotonic()
        told, messages = run(client, f"await bench.compare({pairs}, {seconds})\nprint(bench.medians())")
        found: dict[str, float] = ast.literal_eval(told)
        return {**found, "messages/s": messages / (time.monotonic() - begin_s)}
    finally:
        manager.shutdown_kernel(now=True)


def run(client: Any, code: str) -> tuple[str, int]:
    """What a cell prints, and how many messages widgets send meanwhile.

    Raises:
        SystemExit: the cell failed.
    """
    name, printed, messages = client.execute(code), "", 0
    while True:
        message = client.get_iopub_msg(timeout=_TIMEOUT_S)
        kind, content = message["msg_type"], message["content"]
        messages += kind == "comm_msg"
        if message["parent_header"].get("msg_id") != name:
            continue
        if kind == "error":
            raise SystemExit(f"panel_cost: {content['ename']}: {content['evalue']}")
        if kind == "stream" and content["name"] == "stdout":
            printed += content["text"]
        if kind == "status" and content["execution_state"] == "idle":
            return printed, messages


if __name__ == "__main__":
    main()
