"""Fetches one file whose size and hash are known: time-outs, retries with back-off, and a `.part` file that resumes.

What is not the file (a web page with status 200, another build, more bytes than it has) is never kept.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse, IncompleteRead, InvalidURL
from pathlib import Path
from typing import IO, Any

from .address import encoded, host_of, shown
from .console import Progress
from .pins import Wheel
from .trouble import Trouble, of_writing

try:
    import ssl
except ImportError:  # a Python built without it opens no https address, and says so
    ssl = None  # type: ignore[assignment]

#: Seconds before the second, third, ... try that follows one without progress.
PAUSES = (1.0, 2.0, 4.0)
#: Tries in all: a line that keeps breaking may bring a bit each time.
MOST_TRIES = 20
#: Bytes a second below which a transfer counts as stuck, and the next try begins.
SLOWEST = 4096
_BLOCK = 1 << 16
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_ZIP = b"PK\x03\x04"
_BY_HAND = "Get the file in another way, put it in a folder, and run install.py --from FOLDER."
_LATER = f"Run install.py again when the network is back. {_BY_HAND}"


class _Again(Exception):  # noqa: N818 - a wish, not an error
    """This try failed in a way that the next one may not. slow: it was given up although something arrived."""

    def __init__(self, text: str, slow: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.slow = slow


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers only."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        """As urllib does, less its other kinds of address."""
        if urllib.parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.HTTPError(newurl, code, "redirect to another kind of address", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, part: Path, wheel: Wheel, timeout: float) -> bytes:
    """The bytes of `wheel` from `url`, its size and hash checked. `part`: where the download grows, and resumes.

    timeout: seconds without an answer before a try is given up. Raises Trouble.
    """
    progress = Progress(wheel.file, wheel.size)
    pauses = iter(PAUSES)
    last = ""
    try:
        for _ in range(MOST_TRIES):
            before = _size(part)
            resumed = 0 < before <= wheel.size
            try:
                _receive(url, part, wheel, timeout, progress)
            except _Again as again:
                last = again.text
                if _size(part) > before and not again.slow:
                    pauses = iter(PAUSES)  # it moves
                pause = next(pauses, None)
                if pause is None:
                    break
                time.sleep(pause)
                continue
            data = _verified(part, wheel)
            if data is not None:
                return data
            if not resumed:
                raise Trouble(
                    f"{shown(url)} is not the file that this version of the pack pins (its hash differs).",
                    f"Update the pack and run install.py again. {_BY_HAND}",
                )
    finally:
        progress.finish()
    raise Trouble(last, _LATER)


def _verified(part: Path, wheel: Wheel) -> bytes | None:
    """The content of a whole download; None, and the download gone, when its hash is wrong."""
    try:
        data = part.read_bytes()
        if hashlib.sha256(data).hexdigest() == wheel.sha256:
            return data
        part.unlink()
    except OSError as error:
        raise of_writing(error, part.parent) from error
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _receive(url: str, part: Path, wheel: Wheel, timeout: float, progress: Progress) -> None:
    """One try: on return `part` is as long as the wheel. Raises _Again, or Trouble when another try is no use."""
    have = _size(part)
    if have == wheel.size:
        return
    if have > wheel.size:
        have = 0
    try:
        with _open(url, have, timeout) as response:
            start = _start(response, url, part, have)
            with _opened(part, start) as file:
                _store(_blocks(response, url, start, wheel, timeout), file, part, start, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is of another file: begin anew
            _discard(part)
            raise _Again(f"{shown(url)} does not continue a broken download.") from error
        raise _of_status(error.code, url) from error
    except (OSError, HTTPException) as error:
        raise _of_network(error, url, timeout) from error
    if _size(part) < wheel.size:
        raise _Again(f"The transfer from {host_of(url)} broke off.")


def _open(url: str, have: int, timeout: float) -> HTTPResponse:
    headers = {"User-Agent": "vc-attention-install", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    # ProxyHandler, one of the defaults, follows the system's and the environment's settings
    opener = urllib.request.build_opener(_Redirects())
    try:
        address = urllib.parse.urlsplit(encoded(url))
        account, _, server = address.netloc.rpartition("@")
        request = urllib.request.Request(address._replace(netloc=server).geturl(), headers=headers)
        if account:
            word = base64.b64encode(urllib.parse.unquote_to_bytes(account)).decode("ascii")
            request.add_unredirected_header("Authorization", f"Basic {word}")  # for this server, not for the next
        return opener.open(request, timeout=timeout)
    except ValueError as error:  # InvalidURL is one, and also what an impossible host name raises
        raise Trouble(f"{shown(url)} is not an address that can be opened ({error}).", _BY_HAND) from error


def _start(response: HTTPResponse, url: str, part: Path, have: int) -> int:
    """The place in the file at which the answer begins."""
    if response.status == 206:
        given = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if not given or int(given[1]) != have:
            _discard(part)
            raise _Again(f"{host_of(url)} sent another part of the file than was asked for.")
        return have
    if response.status != 200:
        raise _of_status(response.status, url)
    return 0


def _blocks(response: HTTPResponse, url: str, start: int, wheel: Wheel, timeout: float) -> Iterator[bytes]:
    """What arrives, as long as it can be the file and keeps moving."""
    began, received = time.monotonic(), 0
    while True:
        block = response.read1(_BLOCK)  # what is there, not what fills the block: a slow line must not look dead
        if not block:
            return
        if start + received == 0 and not block.startswith(_ZIP[: len(block)]):
            kind = response.headers.get_content_type()
            what = "a web page" if kind == "text/html" else f"something else ({kind})"
            raise Trouble(
                f"{host_of(url)} answers with {what} instead of the file: a login page or a filter may stand between.",
                _BY_HAND,
            )
        received += len(block)
        if start + received > wheel.size:
            raise Trouble(f"{shown(url)} is larger than the file that this version of the pack pins.", _BY_HAND)
        yield block
        if time.monotonic() - began > timeout + received / SLOWEST:
            raise _Again(f"The transfer from {host_of(url)} is too slow.", slow=True)


def _opened(part: Path, start: int) -> IO[bytes]:
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("ab" if start else "wb", buffering=0)
    except OSError as error:
        raise of_writing(error, part.parent) from error
    return file


def _store(blocks: Iterator[bytes], file: IO[bytes], part: Path, done: int, progress: Progress) -> None:
    for block in blocks:
        rest = memoryview(block)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            file.close()
            _discard(part)  # what cannot grow only takes the room that is missing
            raise of_writing(error, part.parent) from error
        done += len(block)
        progress.update(done)


def _discard(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError as error:
        raise of_writing(error, part.parent) from error


def _of_status(status: int, url: str) -> Trouble | _Again:
    """The meaning of an HTTP status that brings no file."""
    if status in _RETRIED:
        return _Again(f"{host_of(url)} is out of order or overloaded (status {status}).")
    if status in (404, 410):
        return Trouble(f"{shown(url)} does not exist (status {status}).", f"Update the pack. {_BY_HAND}")
    if status in (401, 403):
        return Trouble(f"{host_of(url)} refuses to give the file (status {status}).", f"Try again later. {_BY_HAND}")
    if status == 407:
        return Trouble("The proxy of this machine asks for a password (status 407).", _BY_HAND)
    if 300 <= status < 400:
        return Trouble(f"{host_of(url)} redirects in a circle or to nowhere (status {status}).", _BY_HAND)
    return Trouble(f"{host_of(url)} does not give the file (status {status}).", _BY_HAND)


def _of_network(error: Exception, url: str, timeout: float) -> Trouble | _Again:
    """The meaning of an error below HTTP."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, Exception) else error
    if ssl is not None and isinstance(cause, ssl.SSLCertVerificationError):
        return Trouble(
            f"The certificate of {host_of(url)} is not trusted ({cause.verify_message}).",
            f"Check this machine's clock; a filter that reads the traffic does this too. {_BY_HAND}",
        )
    if ssl is not None and isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        why = getattr(cause, "reason", None) or "no reason given"
        return Trouble(f"No secure connection to {host_of(url)} comes about ({why}).", _BY_HAND)
    if isinstance(error, InvalidURL):
        return Trouble(f"{shown(url)} is not an address that can be opened.", _BY_HAND)
    if isinstance(cause, TimeoutError):
        return _Again(f"{host_of(url)} does not answer within {timeout:g} seconds.")
    if isinstance(reason, str) and "unknown url type" in reason:
        return Trouble("This Python has no support for https.", _BY_HAND)
    if isinstance(cause, IncompleteRead):
        return _Again(f"The transfer from {host_of(url)} broke off.")
    if isinstance(cause, HTTPException) and not isinstance(cause, ConnectionError):
        return _Again(f"{host_of(url)} does not answer as a web server ({type(cause).__name__}).")
    why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return _Again(f"{host_of(url)} cannot be reached{_way(url)} ({why}).")


def _way(url: str) -> str:
    """Which proxy stands between, if one does."""
    address = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(address.scheme, "")
    if not proxy or urllib.request.proxy_bypass(address.hostname or ""):
        return ""
    return f" through the proxy {host_of(proxy if '//' in proxy else '//' + proxy)}"
