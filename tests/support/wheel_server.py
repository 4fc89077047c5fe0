"""A web server on loopback that serves files well, or in one of the ways that go wrong out there."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class WheelServer(ThreadingHTTPServer):
    """`files`: name -> bytes. `faults`: how the next requests go wrong, one name for each, the last one for good:

    "" serves; "404", "403", "429", "500" (any status); "silent" accepts and says nothing; "trickle" a few bytes a
    second; "cut" half of what is left, then the line breaks; "reset" no answer at all; "html" a web page with status
    200; "html-broken" the same without an end; "other" as many other bytes; "longer" more bytes than the file has;
    "no-range" ignores Range; "wrong-range" another part; "redirect" to the file; "loop" to itself; "elsewhere" to an
    address that is no web address; "gzip-lie" claims an encoding.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.faults: list[str] = [""]
        #: (path, Range header or "") of every request.
        self.requests: list[tuple[str, str]] = []
        #: Their Authorization headers.
        self.accounts: list[str] = []
        #: Bytes a second when set, for downloads that take a while.
        self.rate = 0
        self.scheme = "http"
        self.stopping = threading.Event()
        self._turn = threading.Lock()

    @property
    def address(self) -> str:
        """Where the files are."""
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/wheels/"

    def fault(self) -> str:
        """The way this request goes."""
        with self._turn:
            return self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: WheelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.close_connection = True
        wanted = self.headers.get("Range", "")
        self.server.requests.append((self.path, wanted))
        self.server.accounts.append(self.headers.get("Authorization", ""))
        fault = self.server.fault()
        data = self.server.files.get(self.path.rpartition("/")[2].partition("?")[0])
        if fault.isdigit():
            self._page(int(fault))
        elif fault == "silent":
            self.server.stopping.wait(60)
        elif fault == "reset":
            self.connection.shutdown(2)
        elif fault in ("redirect", "loop", "elsewhere"):
            # a redirect to itself is one that urllib sees only after ten rounds: the query changes
            target = {"redirect": self.path, "loop": f"{self.path}?{time.monotonic_ns()}", "elsewhere": "ftp://x/y"}
            if fault == "loop":
                self.server.faults.insert(0, "loop")
            self._head(302, {"Location": target[fault], "Content-Length": "0"})
        elif fault in ("html", "html-broken"):
            self._page(200, ended=fault == "html")
        elif data is None:
            self._page(404)
        else:
            self._file(data, wanted, fault)

    def _file(self, data: bytes, wanted: str, fault: str) -> None:
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted and fault != "no-range" else 0
        if start >= len(data):
            self._page(416)
            return
        if fault == "wrong-range":
            start = max(start - 1, 0)
        if fault == "other":
            data = data[:4] + bytes(len(data) - 4)
        if fault == "longer":
            data += bytes(5000)
        rest = data[start:]
        headers = {"Content-Length": str(len(rest)), "Content-Type": "application/octet-stream"}
        if start or fault == "wrong-range":
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if "Content-Range" in headers else 200, headers)
        if fault == "trickle":
            for byte in rest:
                if self.server.stopping.wait(0.2):
                    return
                self.wfile.write(bytes([byte]))
        elif fault == "cut":
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
        elif self.server.rate:
            step = max(self.server.rate // 20, 1)
            for begin in range(0, len(rest), step):
                self.wfile.write(rest[begin : begin + step])
                if self.server.stopping.wait(0.05):
                    return
        else:
            self.wfile.write(rest)

    def _page(self, status: int, ended: bool = True) -> None:
        page = b"<!DOCTYPE html><html><body>Please log in.</body></html>"
        length = len(page) if ended else len(page) + 100000
        self._head(status, {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(length)})
        self.wfile.write(page)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()


@contextlib.contextmanager
def serving(files: dict[str, bytes], certificate: Path | None = None) -> Iterator[WheelServer]:
    """A running server. certificate: a PEM file with key and certificate, for https."""
    server = WheelServer(files)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
