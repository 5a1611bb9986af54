"""JupyterLab with one notebook open, in a folder and with settings of its own."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nbformat

from tests.ui.browser import opened_page

_TOKEN = "tests"
_QUIET = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
_ASK = """
async (expression) => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
  const request = kernel.requestExecute({ code: "", silent: true, user_expressions: { answer: expression } });
  const { content } = await request.done, { answer } = content.user_expressions;
  return answer.status === "ok" ? answer.data["text/plain"] : `${answer.ename}: ${answer.evalue}`;
}
"""
_THREE_FRAMES = """
async () => { for (let left = 3; left; left--) await new Promise((done) => requestAnimationFrame(done)); }
"""
_METADATA = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
_IS_IDLE = """
() => {
  const widget = window.jupyterapp && window.jupyterapp.shell.currentWidget;
  const session = widget && widget.sessionContext && widget.sessionContext.session;
  return Boolean(session && session.kernel && session.kernel.status === "idle");
}
"""


class Lab:
    """The open notebook."""

    def __init__(self, page: Any, errors: list[str]) -> None:
        self.page = page
        self.errors = errors

    def run_all(self) -> None:
        """Run every cell and wait for the last."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
        self.wait_until_ran()

    def wait_until_ran(self) -> None:
        """Until every code cell that has words in it has run."""
        self.page.wait_for_function(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
              .filter((cell) => cell.model.type === "code" && cell.model.sharedModel.getSource())
              .every((cell) => cell.model.executionState !== "running" && cell.model.executionCount)""",
            timeout=120_000,
        )

    def wait_until_painted(self) -> None:
        """Until what is due has been painted, however slowly frames come."""
        self.page.wait_for_timeout(200)
        self.page.evaluate(_THREE_FRAMES)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the kernel, as its ``repr`` tells it."""
        text = self.page.evaluate(_ASK, expression)
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError) as error:
            raise AssertionError(f"{expression} gave {text}") from error

    def wait_for(self, expression: str, value: Any, *, timeout_s: float = 90) -> None:
        """Until an expression in the kernel has a value."""
        until = time.monotonic() + timeout_s
        while (found := self.ask(expression)) != value:
            if time.monotonic() > until:
                raise AssertionError(f"{expression} is {found!r} and not {value!r} after {timeout_s} s")
            self.page.wait_for_timeout(50)


@contextmanager
def opened_lab(browser: Any, folder: Path, cells: Sequence[str], *, dark: bool = False) -> Iterator[Lab]:
    """A notebook of these cells, opened and not yet run, with its kernel idle."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=_METADATA)
    nbformat.write(notebook, folder / "notebook.ipynb")
    with _server(folder, dark=dark) as address, opened_page(browser, dark=dark) as (page, errors):
        page.goto(f"{address}/lab/tree/notebook.ipynb?token={_TOKEN}")
        page.set_default_timeout(90_000)
        page.wait_for_selector(".jp-Notebook")
        page.wait_for_function(_IS_IDLE)
        yield Lab(page, errors)


@contextmanager
def _server(folder: Path, *, dark: bool) -> Iterator[str]:
    settings = {**_QUIET}
    if dark:
        settings["@jupyterlab/apputils-extension/themes"] = {"theme": "JupyterLab Dark"}
    for name, values in settings.items():
        path = folder / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    port, log = _free_port(), folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(folder, port), env=_environment(folder), cwd=folder, stdout=output, stderr=output
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={_TOKEN}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A server on a busy machine may take longer to end its kernels than a test should wait; they end behind it."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _command(folder: Path, port: int) -> list[str]:
    options = {
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "IdentityProvider.token": _TOKEN,
        "LabApp.expose_app_in_browser": True,
        "LabApp.news_url": None,
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LabApp.extension_manager": "readonly",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *flags]


def _environment(folder: Path) -> dict[str, str]:
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    return {**os.environ, **{name: str(folder / place) for name, place in places.items()}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 180) -> None:
    until = time.monotonic() + timeout_s
    while True:
        try:
            with urlopen(address, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.2)
