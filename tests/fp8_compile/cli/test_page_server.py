"""What ``fp8-compile view`` serves, to whom, and what clients can't do to it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from pathlib import Path
from typing import Iterator

import pytest
from made_up_dump import write_dump

from fp8_compile.cli import page_server
from fp8_compile.cli.command import MISTAKE, main
from fp8_compile.cli.page_server import HEADERS, LOOPBACK, MOST_THREADS, PageServer


@contextlib.contextmanager
def serving(root: Path, *names: str) -> Iterator[PageServer]:
    with PageServer(0, root.resolve(), {name: root.resolve() / name for name in names}) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


BAD_REPORTS = [b"[1]", b"{", b"\xff\xfe", b"[" * 200_000, b'{"rows": [3]}', b'{"rows": [], "matmuls": "\\ud800"}', b""]


@pytest.mark.parametrize("bad", BAD_REPORTS, ids=range(len(BAD_REPORTS)))
def test_one_bad_report_leaves_the_others_in_the_list(bad: bytes, tmp_path: Path) -> None:
    write_dump(tmp_path / "graph_000", ["up"])
    write_dump(tmp_path / "graph_001", ["down"])
    (tmp_path / "graph_000" / "report.json").write_bytes(bad)
    with serving(tmp_path, "graph_000", "graph_001") as server:
        status, _, text = ask(server, "/")
        assert status == 200 and "graph_000" in text and "1 of 1 matmuls" in text
        assert "can't be read:" in text.replace("&#x27;", "'") or b"ud800" in bad
        assert ask(server, "/graph_001")[0] == 200


def test_every_answer_has_the_headers_that_keep_it_to_itself(tmp_path: Path) -> None:
    write_dump(tmp_path / "graph_000", ["up"])
    write_dump(tmp_path / "graph_001", ["down"])
    (tmp_path / "graph_001" / "graphs.json").write_text("{")
    with serving(tmp_path, "graph_000", "graph_001") as server:
        answers = {
            200: ask(server, "/graph_000"),
            500: ask(server, "/graph_001"),
            404: ask(server, "/attic"),
            403: ask(server, "/", Host="evil.example:80"),
            501: ask(server, "/", "POST"),
            414: ask(server, "/" + "x" * 70_000),
        }
    for status, (got, headers, _) in answers.items():
        assert got == status and {name: headers.get(name) for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert (HEADERS["X-Content-Type-Options"], HEADERS["X-Frame-Options"]) == ("nosniff", "DENY")


def test_head_is_get_without_the_body(tmp_path: Path) -> None:
    write_dump(tmp_path / "graph_000", ["up"])
    with serving(tmp_path, "graph_000") as server:
        for path in ("/", "/attic"):
            (status, headers, text), (same, others, nothing) = ask(server, path), ask(server, path, "HEAD")
            assert status == same and headers["Content-Length"] == others["Content-Length"] and text and not nothing


def test_links_out_of_the_folder_are_not_followed_and_those_within_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outside = write_dump(tmp_path / "outside", ["secret"])
    write_dump(run / "graph_000", ["up"])
    (run / "graph_001").symlink_to(outside)
    (run / "graph_002").symlink_to(run / "graph_000")
    write_dump(run / "graph_003", ["down"])
    (run / "graph_003" / "report.json").unlink()
    (run / "graph_003" / "report.json").symlink_to(outside / "report.json")
    with serving(run, "graph_000", "graph_001", "graph_002", "graph_003") as server:
        for path in ("/", "/graph_001", "/graph_003"):
            text = ask(server, path)[2]
            assert "is a link out of" in text and "secret" not in text
        assert ask(server, "/graph_002")[0] == ask(server, "/graph_000")[0] == 200


def test_clients_that_stall_take_few_threads_and_lose_their_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(page_server, "LONGEST_SECONDS", 2.0)
    monkeypatch.setattr(page_server.Pages, "timeout", 1.0)
    write_dump(tmp_path / "graph_000", ["up"])
    before = threading.active_count()
    with serving(tmp_path, "graph_000") as server, contextlib.ExitStack() as clients:
        address = (LOOPBACK, server.server_port)
        stalled = [clients.enter_context(socket.create_connection(address, timeout=10)) for _ in range(100)]
        most = 0
        answers = []
        for client in stalled:
            most = max(most, threading.active_count())
            answers.append(client.recv(12))
        assert {*answers} == {b"HTTP/1.0 503", b""}, "some are told to wait, the others are closed after a while"
        assert most <= before + 1 + MOST_THREADS
        drip, start = clients.enter_context(socket.create_connection(address, timeout=10)), time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 8:
                drip.sendall(b"G")
                time.sleep(0.2)
        assert time.monotonic() - start < 6, "closed however busy it is"
        assert ask(server, "/")[0] == 200


def test_a_port_in_use_is_a_mistake_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path / "graph_000", ["up"])
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port), "--no-browser"]) == MISTAKE
    assert f"--port {port} can't be used: Address already in use; leave --port out" in capsys.readouterr().err
