"""Requests as they came, on disk, for those who look for a client's mistake or a model's. Off unless a folder is set.

A file a request, readable by its owner alone: body, figures, and the texts that looked like a call and were none. Within
the limit; the oldest files make room. Nothing else in the folder is touched.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from q27app.errors import UsageError, why

log = logging.getLogger("q27app.daemon")

PREFIX, SUFFIX = "q27app-request-", ".json"
MAX_SHARE = 4
"""No file takes more than 1 / MAX_SHARE of the limit; a larger one is left out."""


class Capture:
    """folder: made if it is missing. limit_bytes: of all files together. `write` may be called from any thread.

    Raises UsageError for a folder that cannot be used, or that others may read.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = folder.stat().st_mode & 0o777
        except OSError as error:
            raise UsageError(f"{folder}: requests cannot be captured there: {why(error)}.") from error
        if mode & 0o077:
            raise UsageError(f"{folder}: others can read this folder (mode {mode:04o}).", f"chmod 700 {folder}")
        self._folder, self._limit = folder, limit_bytes
        self._lock = threading.Lock()

    def write(self, name: str, value: dict[str, Any]) -> None:
        """One request's file. A disk that refuses is logged, never the request's failure."""
        raw = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        if len(raw) > self._limit // MAX_SHARE:
            log.warning("request %s: %d bytes are too many to capture", name, len(raw))
            return
        path = self._folder / f"{PREFIX}{name}{SUFFIX}"
        try:
            with self._lock:
                self._make_room(len(raw))
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(raw)
        except OSError as error:
            log.warning("request %s cannot be captured: %s", name, why(error))

    def _make_room(self, size: int) -> None:
        files = [(path.stat().st_mtime_ns, path.name, path.stat().st_size, path) for path in self._ours()]
        total = size + sum(entry[2] for entry in files)
        for _, _, length, path in sorted(files):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= length

    def _ours(self) -> list[Path]:
        return [path for path in self._folder.glob(f"{PREFIX}*{SUFFIX}") if path.is_file() and not path.is_symlink()]
