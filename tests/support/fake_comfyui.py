"""Stands in for ComfyUI's main.py in tests of `tools/server.py`: the same HTTP routes, no models.

What it does is chosen by FAKE_COMFYUI in its environment: "" serves; "die" prints and exits; "deaf" never listens;
"stubborn" ignores SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

MODE = os.environ.get("FAKE_COMFYUI", "")
HISTORY: dict[str, dict] = {}


class Handler(BaseHTTPRequestHandler):
    """Answers as ComfyUI does. A prompt's `class_type` says how it ends."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Silence."""

    def answer(self, content: object, status: int = 200) -> None:
        """Send JSON."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """The routes that are read."""
        if self.path == "/system_stats":
            self.answer({"argv": sys.argv[1:], "pythonpath": os.environ.get("PYTHONPATH", "")})
        elif self.path.startswith("/history/"):
            name = self.path.rpartition("/")[2]
            record = HISTORY.get(name, {})
            record["looks"] = record.get("looks", 0) + 1
            # the first look comes too early, as with a real sampler
            self.answer({name: record} if record.get("status") and record["looks"] > 1 else {})
        elif self.path == "/object_info":
            self.answer({"VCAttentionPatch": {}})
        elif self.path.startswith("/view?"):
            self.send_response(200)
            self.send_header("Content-Type", "image/webp")
            self.end_headers()
            self.wfile.write(b"RIFF" + self.path.encode())
        else:
            self.answer({}, 404)

    def do_POST(self) -> None:
        """The routes that are written."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = body["prompt"]["1"]["class_type"]
        if kind == "refused":
            error = {"class_type": "KSampler", "errors": [{"message": "Value not in list", "details": "sampler: 'x'"}]}
            self.answer({"error": {"message": "Prompt outputs failed validation"}, "node_errors": {"1": error}}, 400)
            return
        status: dict = {"status_str": "success", "completed": True, "messages": []}
        if kind == "fails":
            detail = {"node_id": "1", "node_type": "KSampler"}
            detail |= {"exception_type": "ValueError", "exception_message": "no\n"}
            status = {"status_str": "error", "completed": False, "messages": [["execution_error", detail]]}
        if kind == "dies":
            os._exit(4)
        HISTORY[kind] = {"status": status, "outputs": {"9": {"images": [{"filename": "a.webp"}]}}}
        self.answer({"prompt_id": kind})


def main() -> None:
    """See the module."""
    print("fake ComfyUI starts", flush=True)
    if MODE == "die":
        print("ImportError: something is missing", flush=True)
        sys.exit(3)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "deaf":
        time.sleep(60)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
