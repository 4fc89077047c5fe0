"""Addresses of servers as they are shown and sent; nothing here opens one."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path


def host_of(url: str) -> str:
    """The server of an address, without account and password."""
    try:
        address = urllib.parse.urlsplit(url)
        name = address.hostname or "the server"
        return (f"[{name}]" if ":" in name else name) + (f":{address.port}" if address.port else "")
    except ValueError:
        return "the server"


def shown(url: str) -> str:
    """An address that may be shown and copied: without account, password and query."""
    try:
        address = urllib.parse.urlsplit(url)
        return f"{address.scheme}://{host_of(url)}{address.path}"
    except ValueError:
        return "the address"


def encoded(url: str) -> str:
    """An address with everything escaped that a server must not get as it is."""
    return urllib.parse.quote(url, safe="%/:?#[]@!$&'()*+,;=~")


def local_path(url: str) -> Path:
    """The file of a `file:` address, `file:///C:/folder` and `file://server/share` of Windows included."""
    address = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(address.path)
    if re.match(r"/[A-Za-z]:", path):
        path = path[1:]
    return Path(f"//{address.netloc}{path}" if address.netloc not in ("", "localhost") else path)
