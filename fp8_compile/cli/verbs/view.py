"""Serve the report of a dump folder on this machine alone, and open it in a browser.

    fp8-compile view fp8_dumps                 every graph of a run
    fp8-compile view fp8_dumps/graph_000       one graph

The page is made again whenever it is loaded, so that a running training shows its newest steps. Ctrl+C ends it.
report.html in the folder is the same page as a file.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from fp8_compile.cli.dump_folder import graph_folders
from fp8_compile.cli.page_server import LOOPBACK, PageServer
from fp8_compile.cli.terminal import say

HELP = "look at a dump folder in the browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a dump folder, or one graph_NNN of it")
    parser.add_argument("--port", type=int, default=0, help="a fixed port instead of any free one")
    parser.add_argument("--no-browser", action="store_true", help="only serve, don't open a browser")


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port {options.port} is not a port; expected 0 (any free one) to 65535")
    root = options.folder.resolve()
    folders = {folder.name: folder for folder in graph_folders(root)}
    with PageServer(options.port, root, folders) as server:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        say(f"serving {len(folders)} report{'s'[: len(folders) != 1]} at {address} (Ctrl+C ends)")
        if not options.no_browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
    return 0
