"""A daemon of our own as a child process: `q27app serve` on a free loopback port, stopped at the end.

It reads none of the caller's configuration, only the settings it is given.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from q27app.config import child_environment, variable
from q27app.errors import EngineDied, Q27Error, Unreachable

START_LIMIT_S = 300.0
STOP_LIMIT_S = 15.0
PR_SET_PDEATHSIG = 1


class ChildEnded(Q27Error):
    """The daemon stopped by itself; leaves with the same exit code."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"the daemon ended with exit code {code}. Its last words:\n{words}")
        self.exit_code = code if 0 < code < 128 else EngineDied.exit_code


class ChildDaemon:
    """`with ChildDaemon(settings) as daemon:` has a daemon that answers at daemon.url. settings: "section.key" -> value, as in
    config.toml. Raises ChildEnded, or Unreachable after limit_s."""

    def __init__(self, settings: Mapping[str, str | int | bool], limit_s: float = START_LIMIT_S) -> None:
        self._settings, self._limit_s = dict(settings), limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="q27app-daemon-")
        self._log = Path(self._folder.name) / "log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ChildDaemon:
        try:
            self._process = self._start()
            self._wait_ready(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            _stop(self._process)
            self._process = None
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        assert self._process is not None, "use `with ChildDaemon(...)`"
        return self._process.pid

    def last_words(self, num_lines: int = 12) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:]) if self._log.exists() else ""

    def _start(self) -> subprocess.Popen[bytes]:
        configuration = Path(self._folder.name) / "config.toml"
        configuration.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in self._settings.items()))
        package_folder = str(Path(__file__).resolve().parents[1])  # this very package, whatever the working directory holds
        command = [sys.executable, "-P", "-m", "q27app", "serve", "--host", "127.0.0.1", "--port", str(self.port)]
        search_path = os.pathsep.join(filter(None, [package_folder, variable("PYTHONPATH")]))
        environment = child_environment({"Q27APP_CONFIG": str(configuration), "NOTIFY_SOCKET": "",
                                         "PYTHONPATH": search_path}, settings=False)
        with self._log.open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                    preexec_fn=_end_with_parent)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + self._limit_s
        while time.monotonic() < limit:
            if process.poll() is not None:
                raise ChildEnded(process.returncode, self.last_words())
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise Unreachable(f"the daemon was not ready after {self._limit_s:.0f} s. Its last words:\n{self.last_words()}")


def _end_with_parent() -> None:
    """In the child: SIGTERM when the process that started it ends in whatever way (Linux; elsewhere nothing)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    except (OSError, AttributeError):
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
