"""Start a headless ComfyUI with this pack in it, talk to it over HTTP, and stop it. Standard library only.

    with Server(comfyui_dir, python, user_dir=folder) as server:
        outputs = server.queue(prompt)

`user_dir` is ComfyUI's `--base-directory`: its models, custom_nodes, input, output, temp and user folders are made
there, so neither the ComfyUI checkout nor the user's own folders are written to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import comfyui
from .messages import ToolError
from .progress import Step

ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "ComfyUI-VC-Attention"
HOST = "127.0.0.1"
START_TIMEOUT = 600.0
#: What the pack is made of, for systems where neither a link nor a junction can be made.
PACK_PARTS = ("__init__.py", "nodes", "kernels", "web", "workflows", "locales", "pyproject.toml")


class Server:
    """One ComfyUI process.

    comfyui_dir: the checkout. python: the interpreter of its environment. port: a free one is chosen when None; a
    busy one is a ToolError. user_dir: see the module. custom_nodes: packs to make visible, this one by default.
    arguments: further command line arguments of ComfyUI. variables: environment of the process, by default that of
    `comfyui.python_environment`. device: "cpu", "cuda", ... or None to find out.
    """

    def __init__(
        self,
        comfyui_dir: Path,
        python: Path,
        port: int | None = None,
        user_dir: Path | None = None,
        custom_nodes: Sequence[Path] = (ROOT,),
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        device: str | None = None,
    ) -> None:
        self.directory = Path(comfyui_dir)
        self.python = Path(python)
        self.port = free_port() if port is None else port
        self.user_dir = Path(user_dir or comfyui.CACHE / "user").resolve()
        self.custom_nodes = list(custom_nodes)
        self.arguments = list(arguments)
        self.variables = variables
        self.device = device
        self.log_file = self.user_dir / "comfyui.log"
        self.client_id = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a slash at the end."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start ComfyUI and return when it answers. ToolError, with the log's tail, when it does not."""
        require_free(self.port)
        make_user_dir(self.user_dir, self.custom_nodes)
        variables = dict(self.variables or comfyui.python_environment(self.python, self.directory))
        variables.update(PYTHONUNBUFFERED="1")
        if self.device is None:
            self.device = comfyui.device(self.python)
        with Step("Starting ComfyUI") as step:
            with self.log_file.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command_line(),
                    cwd=self.directory,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            try:
                self._wait_until_ready(step, timeout)
            except BaseException:
                self.stop()
                raise
            step.finish(f"ready at {self.url}")

    def command_line(self) -> list[str]:
        """The command that starts this ComfyUI."""
        database = (self.user_dir / "user" / "comfyui.db").as_posix()
        command = [str(self.python), str(self.directory / "main.py"), "--listen", HOST, "--port", str(self.port)]
        command += ["--base-directory", str(self.user_dir), "--database-url", f"sqlite:///{database}"]
        command += ["--disable-auto-launch", "--disable-api-nodes"]
        return command + (["--cpu"] if self.device == "cpu" else []) + self.arguments

    def _wait_until_ready(self, step: Step, timeout: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None:
                raise ToolError(
                    f"ComfyUI stopped while starting (exit status {self._process.returncode}). The end of its log "
                    f"({self.log_file}):\n{self.log_tail()}"
                )
            with contextlib.suppress(OSError, ValueError):
                self.request("/system_stats", timeout=5)
                return
            if time.monotonic() > deadline:
                raise ToolError(
                    f"ComfyUI did not answer within {timeout:.0f} s. The end of its log ({self.log_file}):\n"
                    f"{self.log_tail()}"
                )
            step.show(self.log_tail(1)[:70])
            time.sleep(0.25)

    def stop(self, timeout: float = 20.0) -> None:
        """End the process, if it runs: politely, then by force."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Until the process ends by itself; its exit status."""
        return self._process.wait() if self._process is not None else 0

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        try:
            with self.log_file.open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, lines)).rstrip()
        except OSError:
            return "(no log)"

    def request(self, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        """GET, or POST of `body` as JSON; the decoded JSON answer, or bytes when it is not JSON.

        HTTP errors are urllib's HTTPError; a server that does not answer is an OSError.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} if data else {})
        # the server is on this machine: a proxy of the environment must not get in between
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as answer:
            content = answer.read()
            kind = answer.headers.get_content_type()
        return json.loads(content) if kind == "application/json" and content else content

    def object_info(self, node: str | None = None) -> dict[str, Any]:
        """ComfyUI's description of every node, or of one. An unknown node gives an empty dict."""
        return self.request("/object_info" + (f"/{urllib.parse.quote(node)}" if node else ""))

    def submit(self, prompt: Mapping[str, Any]) -> str:
        """Queue a prompt in API format; its id. ToolError with ComfyUI's own reasons when it is refused."""
        try:
            answer = self.request("/prompt", {"prompt": prompt, "client_id": self.client_id})
        except urllib.error.HTTPError as error:
            raise ToolError("ComfyUI refused the workflow: " + _refusal(error.read())) from error
        return answer["prompt_id"]

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The finished prompt's record (`outputs`, `status`), or None while it waits or runs."""
        return self.request(f"/history/{prompt_id}").get(prompt_id)

    def queue(
        self,
        prompt: Mapping[str, Any],
        title: str = "Running the workflow",
        timeout: float = 3600.0,
        on_poll: Callable[[Step], None] | None = None,
    ) -> dict[str, Any]:
        """Run a prompt (API format) to its end and return its outputs: `{node id: {"images": [...], ...}}`.

        Raises ToolError when ComfyUI refuses it, when a node fails, or when the server stops. `on_poll` is called
        at every look, with the step whose `show` tells what is going on; by default the log's last line is shown.
        """
        with Step(title) as step:
            try:
                record = self._run(prompt, step, timeout, on_poll)
            except OSError as error:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if self._process is not None:
                        self._process.wait(2)  # a process that just died is still noticed as such
                raise ToolError(
                    f"ComfyUI {'does not answer' if self.running else 'stopped'} ({error}). The end of its log "
                    f"({self.log_file}):\n{self.log_tail()}"
                ) from error
            if record.get("status", {}).get("status_str") != "success":
                raise ToolError(_failure(record))
        return record["outputs"]

    def _run(
        self, prompt: Mapping[str, Any], step: Step, timeout: float, on_poll: Callable[[Step], None] | None
    ) -> dict[str, Any]:
        """Submit, and look until the history has the prompt's record."""
        prompt_id = self.submit(prompt)
        deadline = time.monotonic() + timeout
        while True:
            record = self.history(prompt_id)
            if record is not None:
                return record
            if time.monotonic() > deadline:
                raise ToolError(f"The workflow did not end within {timeout:.0f} s, so it was given up.")
            if on_poll is not None:
                on_poll(step)
            else:
                step.show(self.log_tail(1).rpartition("\r")[2][-70:])
            time.sleep(0.2)

    def interrupt(self) -> None:
        """Stop the prompt that is running."""
        self.request("/interrupt", {})

    def view(self, output: Mapping[str, str]) -> bytes:
        """The file that an entry of `outputs` names (`filename`, `subfolder`, `type`)."""
        query = urllib.parse.urlencode({k: output.get(k, "") for k in ("filename", "subfolder", "type")})
        content = self.request(f"/view?{query}")
        return content if isinstance(content, bytes) else json.dumps(content).encode()


def _refusal(body: bytes) -> str:
    """ComfyUI's answer to a bad prompt, as sentences."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body[:300].decode(errors="replace")
    reasons = [
        f"node {node} ({entry.get('class_type', '?')}): {error.get('message', '')} {error.get('details', '')}".strip()
        for node, entry in (answer.get("node_errors") or {}).items()
        for error in entry.get("errors", [])
    ]
    general = answer.get("error")
    if isinstance(general, dict):
        general = " ".join(str(general.get(key) or "") for key in ("message", "details")).strip()
    return "; ".join(reasons) or str(general)


def _failure(record: Mapping[str, Any]) -> str:
    """Why a prompt did not succeed, from its history record."""
    for kind, message in reversed(record.get("status", {}).get("messages", [])):
        if kind == "execution_error":
            return (
                f"Node {message.get('node_id')} ({message.get('node_type')}) failed: "
                f"{message.get('exception_type')}: {str(message.get('exception_message')).strip()}"
            )
        if kind == "execution_interrupted":
            return "The workflow was interrupted."
    return "The workflow failed, and ComfyUI gave no reason."


def free_port() -> int:
    """A port of this machine that nobody uses right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def require_free(port: int) -> None:
    """ToolError when `port` cannot be listened on."""
    if not 0 < port < 65536:
        raise ToolError(f"Port {port} does not exist; ports go from 1 to 65535.", 2)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as the server itself will bind: an address that is only waiting to be released is free
        option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        probe.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError as error:
            raise ToolError(f"Port {port} is not open to this account; choose one above 1023.") from error
        except OSError as error:
            raise ToolError(
                f"Port {port} is in use by another program (perhaps a ComfyUI that is already running). Stop it, or "
                "choose another port with --port."
            ) from error


def make_user_dir(user_dir: Path, custom_nodes: Sequence[Path]) -> None:
    """Make ComfyUI's base directory with `custom_nodes` in it; links of an earlier run are renewed."""
    for name in ("models", "input", "output", "temp", "user", "custom_nodes"):
        (user_dir / name).mkdir(parents=True, exist_ok=True)
    for pack in custom_nodes:
        pack = pack.resolve()
        link_folder(pack, user_dir / "custom_nodes" / (PACK_NAME if pack == ROOT else pack.name))


def link_folder(source: Path, link: Path) -> str:
    """Make `link` show `source`: a symbolic link, on Windows a junction, else a copy. Returns which."""
    if is_link(link):
        os.rmdir(link) if sys.platform == "win32" else link.unlink()
    else:
        comfyui.remove(link)
    if sys.platform == "win32":
        # a junction needs no special right, a symbolic link does
        import _winapi

        with contextlib.suppress(OSError, AttributeError):
            _winapi.CreateJunction(str(source), str(link))
            return "junction"
    with contextlib.suppress(OSError, NotImplementedError):
        os.symlink(source, link, target_is_directory=True)
        return "link"
    _copy_pack(source, link)
    return "copy"


def is_link(path: Path) -> bool:
    """Whether `path` is a symbolic link or a Windows junction."""
    if path.is_symlink():
        return True
    try:
        return bool(getattr(os.lstat(path), "st_reparse_tag", 0))
    except OSError:
        return False


def _copy_pack(source: Path, target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    if source != ROOT:
        shutil.copytree(source, target, ignore=ignore)
        return
    target.mkdir(parents=True)
    for part in PACK_PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, ignore=ignore)
        elif (source / part).is_file():
            shutil.copy2(source / part, target)
