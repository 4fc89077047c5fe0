"""install.py against a server that goes wrong: status 0, one clear line, and the last good build stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_wheels
from installing import NOWHERE, Pack, start
from small_wheels import check_build
from wheel_server import WheelServer, serving

OLD, NEW = small_wheels.wheel(version="0.0.9"), small_wheels.wheel(size=60000)
NAME = "vc_attention_kernels_hopper-0.1.0-py3-none-any.whl"
KEPT = "Version 0.0.9, installed before, stays in use."


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that pins the new wheel and has the old one installed."""
    pack = Pack(tmp_path_factory.mktemp("template") / "pack")
    pack.pin({"hopper": OLD}, "0.0.9")
    (pack.folder / "wheels").mkdir()
    (pack.folder / "wheels" / NAME.replace("0.1.0", "0.0.9")).write_bytes(OLD)
    assert "are installed now" in pack.run()
    shutil.rmtree(pack.folder / "wheels")
    pack.pin({"hopper": NEW})
    return pack.folder


@pytest.fixture
def server():
    with serving({NAME: NEW}) as running:
        yield running


@pytest.fixture
def pack(template: Path, tmp_path: Path, server: WheelServer) -> Pack:
    """The pack, whose repository is on the server."""
    folder = tmp_path / "pack"
    shutil.copytree(template, folder)
    return Pack(folder, server.address + "owner/pack")


def test_the_release_address_follows_from_the_repository_and_the_version(pack: Pack, server: WheelServer) -> None:
    line = pack.run()
    path = f"/wheels/owner/pack/releases/download/v0.1.0/{NAME}"
    assert server.requests == [(path, "")]
    assert f"from http://127.0.0.1:{server.server_address[1]}{path}). Restart ComfyUI" in line
    check_build(pack.prebuilt, data=NEW)
    pack.run()
    assert len(server.requests) == 1  # the second run needs no network


@pytest.mark.parametrize(
    ("faults", "words", "requests"),
    [
        (["404"], "does not exist (status 404).", 1),
        (["410"], "does not exist (status 410).", 1),
        (["403"], "refuses to give the file (status 403).", 1),
        (["401"], "refuses to give the file (status 401).", 1),
        (["418"], "does not give the file (status 418).", 1),
        (["304"], "redirects in a circle or to nowhere (status 304).", 1),
        (["429"], "is out of order or overloaded (status 429).", 4),
        (["503"], "is out of order or overloaded (status 503).", 4),
        (["html"], "answers with a web page instead of the file: a login page or a filter may stand between.", 1),
        (["html-broken"], "answers with a web page instead of the file", 1),
        (["other"], "is not the file that this version of the pack pins (its hash differs).", 1),
        (["longer"], "is larger than the file that this version of the pack pins.", 1),
        (["loop"], "redirects in a circle or to nowhere (status 302).", None),
        (["elsewhere"], "redirects in a circle or to nowhere (status 302).", 1),
        (["reset"], "cannot be reached (", 4),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_a_server_does_wrong(
    pack: Pack, server: WheelServer, faults: list[str], words: str, requests: int | None
) -> None:
    server.faults = faults
    line = pack.run()
    assert words in line and KEPT in line and line.count("run install.py --from FOLDER") == 1
    assert requests is None or len(server.requests) == requests
    assert len(server.requests) < 15
    check_build(pack.prebuilt, data=OLD)
    server.faults = [""]
    assert "are installed now" in pack.run()
    check_build(pack.prebuilt, data=NEW)


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        (["500", ""], 2),
        (["429", "503", "502", ""], 4),
        (["redirect", ""], 2),
        (["reset", ""], 2),
        (["cut", ""], 2),
        (["cut", "cut", "cut", "cut", "cut", "cut", "cut", ""], 8),
        (["cut", "no-range"], 2),
        (["cut", "wrong-range", ""], 3),
        (["cut", "500", "cut", "reset", ""], 5),
        (["cut", "other", ""], 3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_a_later_try_mends(pack: Pack, server: WheelServer, faults: list[str], requests: int) -> None:
    server.faults = list(faults)
    assert "are installed now" in pack.run()
    assert len(server.requests) == requests
    if faults[0] == "cut":
        assert server.requests[1][1].startswith("bytes=") and server.requests[1][1] != "bytes=0-"
    check_build(pack.prebuilt, data=NEW)
    assert not (pack.prebuilt / ".download").exists()


def test_a_download_that_keeps_breaking_goes_on_in_the_next_run(pack: Pack, server: WheelServer) -> None:
    server.faults = ["cut", "reset"]
    line = pack.run()
    assert "cannot be reached" in line and KEPT in line
    check_build(pack.prebuilt, data=OLD)
    (part,) = (pack.prebuilt / ".download").iterdir()
    assert part.read_bytes() == NEW[: len(NEW) // 2]
    server.faults = [""]
    assert "are installed now" in pack.run()
    assert server.requests[-1][1] == f"bytes={len(NEW) // 2}-"
    check_build(pack.prebuilt, data=NEW)


@pytest.mark.parametrize(
    "content",
    [NEW, NEW + b"more", b"x" * len(NEW), b"x" * 100, b""],
    ids=["whole", "longer", "other", "part of another", "empty"],
)
def test_whatever_an_earlier_download_left(pack: Pack, content: bytes) -> None:
    digest = small_wheels.pins({"hopper": NEW})["wheels"][0]["sha256"]
    part = pack.prebuilt / ".download" / f"{NAME}.{digest[:12]}.part"
    part.parent.mkdir()
    part.write_bytes(content)
    assert "are installed now" in pack.run()
    check_build(pack.prebuilt, data=NEW)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("silent", "does not answer within 0.3 seconds."), ("trickle", "is too slow.")],
)
def test_a_slow_server_is_given_up(pack: Pack, server: WheelServer, fault: str, words: str) -> None:
    server.faults = [fault]
    began = time.monotonic()
    line = pack.run("--timeout", "0.3")
    assert words in line and KEPT in line and time.monotonic() - began < 12
    check_build(pack.prebuilt, data=OLD)
    server.faults = [fault, ""]
    assert "are installed now" in pack.run("--timeout", "0.3")
    check_build(pack.prebuilt, data=NEW)


def test_a_slow_line_is_not_given_up_and_says_how_far_it_is(pack: Pack, server: WheelServer) -> None:
    server.rate = len(NEW)
    process = pack.start("--timeout", "0.5")
    assert "are installed now" in pack.line(process)  # a second of download, twice the time-out
    check_build(pack.prebuilt, data=NEW)


def test_there_is_no_network(pack: Pack, server: WheelServer) -> None:
    command = pack.command()
    try:
        subprocess.run(["unshare", "-rn", "true"], check=True, capture_output=True)
        command = ["unshare", "-rn", *command]  # not even loopback
    except (OSError, subprocess.CalledProcessError):
        pack.repository(NOWHERE)  # a port that nobody listens on
    line = pack.line(start(command, pack.folder))
    assert "cannot be reached (" in line and KEPT in line and server.requests == []
    check_build(pack.prebuilt, data=OLD)


def test_a_name_that_does_not_exist(pack: Pack) -> None:
    pack.repository("https://no-such-host.invalid/pack")
    line = pack.run()
    assert "no-such-host.invalid cannot be reached (" in line and KEPT in line
    check_build(pack.prebuilt, data=OLD)


@pytest.mark.parametrize(
    "address", ["http://", "http://[::1", "http://a b/", "http://127.0.0.1:99999/x", "http://\u00fc..x/"], ids=range(5)
)
def test_an_impossible_address(pack: Pack, address: str) -> None:
    line = pack.run("--from", address)
    assert "are installed now" in line  # the release address is tried next
    check_build(pack.prebuilt, data=NEW)


def test_from_an_address(pack: Pack, server: WheelServer) -> None:
    pack.repository(NOWHERE)
    assert "are installed now" in pack.run("--from", f"{server.address}a folder/\u00fc?token=2")
    assert server.requests[-1][0] == f"/wheels/a%20folder/%C3%BC/{NAME}?token=2"
    check_build(pack.prebuilt, data=NEW)


def test_an_account_in_an_address_is_used_and_not_shown(pack: Pack, server: WheelServer) -> None:
    address = server.address.replace("//", "//me:sec%72et@") + "?key=hidden"
    server.faults = ["404"]
    lines = [pack.run("--from", address, *more) for more in (["--dry-run"], [])]
    server.faults = ["redirect", ""]
    lines.append(pack.run("--from", address))
    assert "does not exist" in lines[1] and "are installed now" in lines[2]
    for line in lines:
        assert f"{server.address}{NAME}" in line
        assert not [word for word in ("me:", "sec", "hidden") if word in line.replace("does not exist", "")]
    ours = "Basic bWU6c2VjcmV0"
    assert server.accounts == [ours, "", ours, ""]  # the release address and a redirect's target are not told


def test_the_registrys_archive_has_no_downloader_and_needs_none(pack: Pack, server: WheelServer) -> None:
    (pack.folder / "kernels" / "install" / "download.py").unlink()
    line = pack.run()
    assert "This copy of the pack downloads nothing by itself." in line and KEPT in line
    assert f"Get {server.address}owner/pack/releases/download/v0.1.0/{NAME} with a browser" in line
    check_build(pack.prebuilt, data=OLD)
    (pack.folder / "wheels").mkdir()
    (pack.folder / "wheels" / NAME).write_bytes(NEW)
    assert "are installed now" in pack.run()
    check_build(pack.prebuilt, data=NEW)
    assert server.requests == []


def test_through_a_proxy_of_the_environment(pack: Pack, server: WheelServer) -> None:
    pack.repository("http://release.invalid/owner/pack")
    proxy = f"http://127.0.0.1:{server.server_address[1]}"
    process = pack.start(variables={"http_proxy": proxy})
    assert "from http://release.invalid/owner/pack/releases" in pack.line(process)
    assert server.requests[0][0].startswith("http://release.invalid/owner/pack/")
    check_build(pack.prebuilt, data=NEW)


def test_a_proxy_that_is_not_there_is_named(pack: Pack) -> None:
    pack.repository("http://release.invalid/pack")
    line = pack.line(pack.start(variables={"http_proxy": "http://me:secret@127.0.0.1:9"}))
    assert "release.invalid cannot be reached through the proxy 127.0.0.1:9 (Connection refused)" in line
    assert "secret" not in line and KEPT in line


def test_https_to_a_server_that_speaks_http(pack: Pack, server: WheelServer) -> None:
    pack.repository(server.address.replace("http:", "https:"))
    line = pack.run()
    assert "No secure connection to 127.0.0.1:" in line and KEPT in line
    check_build(pack.prebuilt, data=OLD)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1 that nobody has signed."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", f"{file}.crt"),
        ],
        check=True,
        capture_output=True,
    )
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


def test_a_certificate_that_is_not_trusted(pack: Pack, certificate: Path) -> None:
    pack.repository(NOWHERE)
    with serving({NAME: NEW}, certificate) as server:
        line = pack.run("--from", server.address)
        assert "The certificate of 127.0.0.1:" in line and "is not trusted (self" in line
        assert len(server.requests) == 0
        trusted = pack.start("--from", server.address, variables={"SSL_CERT_FILE": f"{certificate}.crt"})
        assert "are installed" in pack.line(trusted)
    check_build(pack.prebuilt, data=NEW)


def test_a_python_without_tls(pack: Pack, server: WheelServer, tmp_path: Path) -> None:
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "_ssl.py").write_text("raise ImportError('no ssl here')")
    pack.repository(server.address.replace("http:", "https:"))
    command = pack.command(python=(sys.executable, "-s"))
    process = start(command, pack.folder, {"PYTHONPATH": str(tmp_path / "no")})
    line = pack.line(process)
    assert "This Python has no support for https." in line and KEPT in line
