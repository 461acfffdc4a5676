"""Fetches one file over HTTP into place: resumed, watched, checked, renamed.

    NAME.part       what has arrived          NAME.part.json   its etag and size: bytes of another etag are thrown away
    NAME.lock       held while somebody downloads

`huggingface_hub` tells address, size and etag; the bytes come over plain HTTP with Range. Every wait is bounded by the
stall timer. A 416 or a changed etag starts the file anew, 429 and 5xx wait as told. The name appears only when size and
checksum are right; an etag of 64 hex digits is a sha256, of 32 an md5.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from q27app.errors import FileFormatError, Q27Error, Unreachable, UsageError

STALL_S = 30.0
ATTEMPTS = 6
MAX_WAIT_S = 60.0
CHUNK = 1 << 20
KEEP_FREE = 1 << 30

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Remote:
    """A file as the server describes it. url: where its bytes are; token: sent only to the host of `origin`."""

    url: str
    size: int
    etag: str
    origin: str = ""
    token: str = ""


class _Again(Exception):
    """Worth another attempt after `wait_s`."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def download(ask: Callable[[], Remote], target: Path, progress: Progress | None = None, stall_s: float = STALL_S,
             attempts: int = ATTEMPTS, pause_s: float = 1.0, keep_free: int = KEEP_FREE) -> Path:
    """Fetch what `ask` describes to `target`. ask is called before every attempt, so that a changed file is noticed.

    Attempts that bring bytes forward are not counted. Raises Unreachable, FileFormatError for a wrong checksum,
    UsageError for a full disk or a download that runs already.
    """
    part = target.with_name(target.name + ".part")
    with _lock(target):
        failures, last = 0, ""
        while failures < attempts:
            before = part.stat().st_size if part.exists() else 0
            try:
                remote = ask()
                _prepare(part, remote, keep_free)
                _fetch(remote, part, progress, stall_s, target.name)
                _check(remote, part, target)
                return target
            except _Again as error:
                last, wait_s = str(error), error.wait_s
            except (OSError, http.client.HTTPException) as error:
                last, wait_s = str(error) or type(error).__name__, 0.0
            size = part.stat().st_size if part.exists() else 0
            failures = 1 if size > before else failures + 1
            if failures < attempts:
                time.sleep(min(MAX_WAIT_S, wait_s or pause_s * 2 ** (failures - 1)))
        raise Unreachable(f"{target.name}: {attempts} attempts in a row brought nothing; the last: {last}.",
                          "What has arrived is kept; run the same command again to go on.")


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    with open(target.with_name(target.name + ".lock"), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{target.name} is being downloaded by another program.", "Wait for it.") from None
        yield


def _prepare(part: Path, remote: Remote, keep_free: int) -> None:
    """Throw away a part of another file; see that the rest fits on the disk."""
    note = part.with_name(part.name + ".json")
    wanted = {"etag": remote.etag, "size": remote.size}
    try:
        same = json.loads(note.read_text()) == wanted and part.stat().st_size <= remote.size
    except (OSError, ValueError):
        same = False
    if not same:
        part.unlink(missing_ok=True)
        note.write_text(json.dumps(wanted))
    there = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(part.parent).free
    if remote.size - there + keep_free > free:
        raise UsageError(f"{part.parent}: {free / 1e9:.1f} GB are free, {(remote.size - there) / 1e9:.1f} GB are still to come "
                         f"and {keep_free / 1e9:.1f} GB stay free.", "Make room, or set Q27APP_HOME to another disk.")


def _fetch(remote: Remote, part: Path, progress: Progress | None, stall_s: float, name: str) -> None:
    """Append what is missing. Raises _Again or OSError."""
    start = part.stat().st_size if part.exists() else 0
    if start == remote.size:
        return
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-"}
    if remote.token and urlsplit(remote.url).netloc == urlsplit(remote.origin).netloc:
        headers["Authorization"] = f"Bearer {remote.token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=stall_s) as reply:
            tag = (reply.headers.get("X-Linked-Etag") or reply.headers.get("ETag") or "").removeprefix("W/").strip('"')
            if tag and urlsplit(remote.url).netloc == urlsplit(remote.origin).netloc and tag != remote.etag:
                raise _Again("the file on the server has changed")
            if start and reply.status != 206:
                part.unlink()
                start = 0
            with part.open("ab") as out:
                _copy(reply, out, start, remote.size, progress, name)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            part.unlink(missing_ok=True)
            raise _Again("the server has no such range (416)") from error
        if error.code == 429 or error.code >= 500:
            raise _Again(f"the server answered {error.code}", _seconds(error.headers.get("Retry-After"))) from error
        raise Q27Error(f"{name}: the server answered {error.code} {error.reason}.", _advice(error.code)) from error


def _copy(reply: Any, out: IO[bytes], done: int, size: int, progress: Progress | None, name: str) -> None:
    while done < size:
        piece = reply.read1(min(CHUNK, size - done))
        if not piece:
            raise _Again(f"the connection ended {size - done} bytes too early")
        out.write(piece)
        out.flush()
        done += len(piece)
        if progress is not None:
            progress(done, size, name)


def _check(remote: Remote, part: Path, target: Path) -> None:
    """Compare the checksum where the etag is one, then rename. A wrong file is removed: resuming it would not help."""
    kind = {64: "sha256", 32: "md5"}.get(len(remote.etag)) if re.fullmatch("[0-9a-f]+", remote.etag) else None
    note = part.with_name(part.name + ".json")
    if remote.size == 0 and not part.exists():
        part.touch()
    with part.open("rb") as data:
        if kind:
            found = hashlib.file_digest(data, kind).hexdigest()
            if found != remote.etag:
                part.unlink()
                note.unlink(missing_ok=True)
                raise FileFormatError(f"{target.name}: the {kind} of what arrived is {found}, expected {remote.etag}.",
                                      "It was removed; run the same command again.")
        os.fsync(data.fileno())
    os.replace(part, target)
    note.unlink(missing_ok=True)


def _seconds(text: str | None) -> float:
    return min(MAX_WAIT_S, float(text)) if text and re.fullmatch(r"\d{1,6}(\.\d+)?", text) else 0.0


def _advice(code: int) -> str:
    if code in (401, 403):
        return "Log in with: hf auth login, and accept the model's terms on its page."
    return "Check the name."
