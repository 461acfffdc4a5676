"""A hub on loopback with faults: what HEAD and GET of one repository's files answer."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubDouble:
    """files: name -> bytes. faults: taken one by one by GETs: "truncate", "change", 416, 429, 503, or "stall": nothing comes after
    the first half, as long as the hub is there."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.faults, self.ranges = dict(files), [], []
        self.etags: dict[str, str] = {}
        self._closes = threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_HEAD(self):
                double._answer(self, body=False)

            def do_GET(self):
                double._answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._closes.set()
        self.server.shutdown()
        self.server.server_close()

    def etag(self, name: str) -> str:
        return self.etags.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def _answer(self, handler, body: bool) -> None:
        if handler.path.startswith("/api/models/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in self.files.items()]
            listing = json.dumps(tree).encode()
            return self._send(handler, 200, {}, listing)
        name = handler.path.rsplit("/", 1)[-1]
        if name not in self.files:
            return self._send(handler, 404, {"X-Error-Code": "EntryNotFound"}, b"")
        fault = self.faults.pop(0) if body and self.faults else None
        if fault == "change":
            self.files[name] = self.files[name][::-1]
        data, start = self.files[name], 0
        headers = {"ETag": f'"{self.etag(name)}"', "X-Repo-Commit": "c" * 40}
        if isinstance(fault, int):
            return self._send(handler, fault, {"Retry-After": "0.01"}, b"")
        wanted = handler.headers.get("Range")
        if body:
            self.ranges.append(wanted)
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(handler, 206 if wanted else 200, headers, data[start:], body, fault)

    def _send(self, handler, status, headers, data, body=True, fault=None) -> None:
        handler.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            handler.send_header(key, value)
        handler.end_headers()
        if not body:
            return
        half = data[:len(data) // 2]
        if fault in ("truncate", "stall"):
            handler.wfile.write(half)
            handler.wfile.flush()
            if fault == "stall":
                self._closes.wait(600)
            handler.close_connection = True
        else:
            handler.wfile.write(data)
