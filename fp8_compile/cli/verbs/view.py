"""Serve the report of a dump folder on this machine alone, and open it in a browser.

    fp8-compile view fp8_dumps                 every graph of a run
    fp8-compile view fp8_dumps/graph_000       one graph

The page is made anew whenever it is loaded, so that a running training shows its newest passes. Ctrl+C ends it.
report.html in the folder is the same page as a file.
"""

from __future__ import annotations

import argparse
import functools
import html
import http.server
import urllib.parse
import webbrowser
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..dump_folder import graph_folders, read_reports
from ..terminal import say

HELP = "look at a dump folder in the browser"
LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a dump folder, or one graph_NNN of it")
    parser.add_argument("--port", type=int, default=0, help="a fixed port instead of any free one")
    parser.add_argument("--no-browser", action="store_true", help="only serve, don't open a browser")


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port {options.port} is not a port; expected 0 (any free one) to 65535")
    folders = {folder.name: folder for folder in graph_folders(options.folder.resolve())}
    with http.server.ThreadingHTTPServer((LOOPBACK, options.port), functools.partial(Pages, folders)) as server:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        say(f"serving {len(folders)} report{'s'[: len(folders) != 1]} at {address} (Ctrl+C ends)")
        if not options.no_browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
    return 0


class Pages(http.server.BaseHTTPRequestHandler):
    """The pages of some graphs, and a list of them where there are several; no other file is served."""

    def __init__(self, folders: dict[str, Path], *args: Any) -> None:
        self.folders = folders
        super().__init__(*args)

    def do_GET(self) -> None:  # noqa: N802  (named by http.server)
        from fp8_compile.report_page import load, page

        # A name that resolves to this machine would let a page of somebody else's read ours.
        if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN, "only this machine is served")
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        if not name and len(self.folders) == 1:
            (name,) = self.folders
        try:
            if not name:
                return self._send(index(self.folders))
            if name not in self.folders:
                return self.send_error(HTTPStatus.NOT_FOUND)
            self._send(page(load(self.folders[name])))
        except (OSError, ValueError) as error:
            self._send(f"<!doctype html><title>fp8_compile</title><p>{html.escape(str(error))}", status=500)

    def _send(self, text: str, status: int = 200) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line a request is of no interest


def index(folders: dict[str, Path]) -> str:
    """A page that lists the graphs of a run."""
    from fp8_compile.report_page import source

    rows = []
    for name, folder in folders.items():
        (report,) = read_reports(folder)
        modules = sorted({str(row.get("module")) for row in report["rows"]})
        shown = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
        counts = f"{report.get('rewritten')} of {report.get('matmuls')} matmuls in FP8"
        rows.append(
            f'<p><a class="link" href="/{urllib.parse.quote(name)}">{html.escape(name)}</a> '
            f'{html.escape(counts)} <span class="note">{html.escape(shown)}</span></p>'
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f"<title>fp8_compile: {len(folders)} graphs</title><style>{source('page.css')}</style>"
        '<header><h1><span class="mark">fp8</span> What was compiled</h1></header>'
        f'<main><section class="card">{"".join(rows)}</section></main></html>'
    )
