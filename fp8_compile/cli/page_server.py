"""A web server for a dump folder's pages: on this machine alone, with few threads, and for no other file."""

from __future__ import annotations

import functools
import html
import http.server
import socket
import sys
import threading
import time
import urllib.parse
from http import HTTPStatus
from pathlib import Path
from typing import Any

from .dump_folder import read_reports

LOOPBACK = "127.0.0.1"
MOST_THREADS = 16  # a browser opens six connections
IDLE_SECONDS = 10.0  # without a byte, after which a connection is closed
LONGEST_SECONDS = 60.0  # of a connection, however busy it is
WAIT_SECONDS = 0.5  # for a thread, before a client is told to come again
# Everything that a page needs is in it; no other site may frame it, read it or guess at its type.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
BUSY = b"HTTP/1.0 503 Service Unavailable\r\n%b\r\n" % "".join(
    f"{name}: {value}\r\n" for name, value in {**HEADERS, "Retry-After": "1", "Content-Length": "0"}.items()
).encode("ascii")
FILES = ("report.json", "graphs.json", "passes.jsonl")


class PageServer(http.server.ThreadingHTTPServer):
    """Serves the pages of graphs; a client that stalls loses its connection, and one too many is told to wait."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, root: Path, folders: dict[str, Path]) -> None:
        self._free = threading.BoundedSemaphore(MOST_THREADS)
        self._since: dict[Any, float] = {}  # connection -> when it was accepted
        try:
            super().__init__((LOOPBACK, port), functools.partial(Pages, root, folders))
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"--port {port} can't be used: {reason}; leave --port out for any free one") from None

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(timeout=WAIT_SECONDS):
            request.settimeout(WAIT_SECONDS)
            try:
                request.sendall(BUSY)
            except OSError:
                pass  # the client has left
            self.shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._since.pop(request, None)
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._since.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """Close connections that send a byte at a time for ever; the server calls this now and then."""
        now = time.monotonic()
        for request in [one for one, since in list(self._since.items()) if now - since > LONGEST_SECONDS]:
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that left or stalled is not an error of ours
            super().handle_error(request, client_address)


class Pages(http.server.BaseHTTPRequestHandler):
    """The pages of some graphs, and a list of them where there are several; no other file is served."""

    server_version, sys_version = "fp8_compile", ""
    timeout = IDLE_SECONDS

    def __init__(self, root: Path, folders: dict[str, Path], *args: Any) -> None:
        self.root, self.folders = root, folders
        super().__init__(*args)

    def do_GET(self) -> None:  # noqa: N802  (named by http.server)
        from fp8_compile.reporting.report_page import load, page

        # A name that resolves to this machine would let someone else's page read ours.
        if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN, "only this machine is served")
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        if not name and len(self.folders) == 1:
            (name,) = self.folders
        if not name:
            return self._send(index(self.root, self.folders))
        if name not in self.folders:
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            check_inside(self.root, self.folders[name])
            self._send(page(load(self.folders[name])))
        except (OSError, ValueError) as error:
            self._send(f"<!doctype html><title>fp8_compile</title><p>{html.escape(str(error))}", status=500)

    do_HEAD = do_GET  # noqa: N815  the same headers; _send and send_error leave the body out

    def end_headers(self) -> None:
        """Add our headers to every answer, errors too."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _send(self, text: str, status: int = 200) -> None:
        body = text.encode("utf-8", errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line per request is of no interest


def check_inside(root: Path, folder: Path) -> None:
    """Raise where a file that the page is made of is a link to somewhere else: it would be shown to whoever asks."""
    for path in (folder, *(folder / name for name in FILES)):
        if not path.resolve().is_relative_to(root):
            raise ValueError(f"{path} is a link out of {root}, which is not followed; copy the file there")


def index(root: Path, folders: dict[str, Path]) -> str:
    """A page that lists the graphs of a run; one that can't be read says why, and the others are there."""
    from fp8_compile.reporting.report_page import source

    rows = []
    for name, folder in folders.items():
        try:
            check_inside(root, folder)
            (report,) = read_reports(folder)
            modules = sorted({str(row.get("module")) for row in report["rows"]})
            counts = f"{report.get('rewritten')} of {report.get('matmuls')} matmuls in FP8"
            note = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
        except (OSError, ValueError) as error:
            counts, note = "can't be read:", str(error)
        rows.append(
            f'<p><a class="link" href="/{urllib.parse.quote(name, errors="replace")}">{html.escape(name)}</a> '
            f'{html.escape(counts)} <span class="note">{html.escape(note)}</span></p>'
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f"<title>fp8_compile: {len(folders)} graphs</title><style>{source('page.css')}</style>"
        '<header><h1><span class="mark">fp8</span> What was compiled</h1></header>'
        f'<main><section class="card">{"".join(rows)}</section></main></html>'
    )
