"""Conversations in SQLite, in WAL mode: what was written is there after a crash, and several programs may have it open.

A conversation is a tree of messages; `leaf` names the end of the branch in front. An answer that streams is written at least
twice a second (`WRITE_INTERVAL_S`); one that was not written for STALE_S has lost its writer and counts as interrupted. Calls
block for milliseconds and are safe from any thread. Every failure is a `Q27Error`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q27app.errors import FileFormatError, UsageError

WRITE_INTERVAL_S = 0.5
STALE_S = 10.0
VERSION = 1
STATES = ("streaming", "done", "stopped", "failed", "interrupted")
_SCHEMA = """
CREATE TABLE conversations (
  id INTEGER PRIMARY KEY, title TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL,
  leaf INTEGER, settings TEXT NOT NULL DEFAULT '{}');
CREATE TABLE messages (
  id INTEGER PRIMARY KEY, conversation INTEGER NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
  parent INTEGER, role TEXT NOT NULL, text TEXT NOT NULL, reasoning TEXT NOT NULL, calls TEXT NOT NULL, stats TEXT NOT NULL,
  state TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL);
CREATE INDEX messages_of ON messages(conversation, parent);
"""


@dataclass(frozen=True)
class Message:
    """parent: the message before it, None for the first. calls: [{"name", "arguments"}]. state: one of STATES."""

    id: int
    parent: int | None
    role: str
    text: str
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    state: str = "done"
    created_at: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """settings: sampler and the like, as the chat screen keeps them."""

    id: int
    title: str
    updated_at: float
    leaf: int | None
    settings: Mapping[str, Any]


class History:
    """The open file. Use as a context manager, or `close` it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=5.0, isolation_level=None)
            with self._failing():
                self._open()
        except sqlite3.Error as error:
            raise UsageError(f"{path}: the history cannot be opened: {error}.", "Is the folder writable?") from error

    def _open(self) -> None:
        self.path.chmod(0o600)
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            self._db.execute(f"PRAGMA {pragma}")
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise FileFormatError(f"{self.path}: written by a newer q27app (format {version}, this one reads {VERSION}).",
                                      "Upgrade q27app, or move the file away.")
            if version == 0:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={VERSION}")
            self._db.execute("UPDATE messages SET state = 'interrupted' WHERE state = 'streaming' AND updated_at < ?",
                             (time.time() - STALE_S,))

    def __enter__(self) -> History:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing may be called afterwards."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise FileFormatError(f"{self.path}: the history cannot be used: {error}.",
                                  "Move the file away; a new one is made at the next start.") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failing():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _all(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._failing():
            return self._db.execute(statement, values).fetchall()

    def conversations(self, search: str = "", limit: int = 500) -> list[Conversation]:
        """The latest first. search: only those with this text in the title or a message."""
        wanted = "%" + search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        rows = self._all(
            "SELECT id, title, updated_at, leaf, settings FROM conversations AS c WHERE ? = '' OR title LIKE ? ESCAPE '\\' "
            "OR EXISTS (SELECT 1 FROM messages WHERE conversation = c.id AND text LIKE ? ESCAPE '\\') "
            "ORDER BY updated_at DESC, id DESC LIMIT ?",
            (search, wanted, wanted, limit))
        return [Conversation(*row[:4], _object(row[4])) for row in rows]

    def conversation(self, number: int) -> Conversation:
        """One of them. Raises UsageError."""
        rows = self._all("SELECT id, title, updated_at, leaf, settings FROM conversations WHERE id = ?", (number,))
        if not rows:
            raise UsageError(f"there is no conversation {number}.")
        return Conversation(*rows[0][:4], _object(rows[0][4]))

    def create(self, title: str, settings: Mapping[str, Any] | None = None) -> int:
        """A new conversation's id."""
        now = time.time()
        with self._transaction() as db:
            cursor = db.execute("INSERT INTO conversations (title, created_at, updated_at, settings) VALUES (?, ?, ?, ?)",
                                (title, now, now, json.dumps(dict(settings or {}))))
            return cursor.lastrowid or 0

    def change(self, number: int, *, title: str | None = None, settings: Mapping[str, Any] | None = None,
               leaf: int | None = None) -> None:
        """Rename, keep settings, or bring another branch to the front."""
        with self._transaction() as db:
            if title is not None:
                db.execute("UPDATE conversations SET title = ? WHERE id = ?", (title, number))
            if settings is not None:
                db.execute("UPDATE conversations SET settings = ? WHERE id = ?", (json.dumps(dict(settings)), number))
            if leaf is not None:
                db.execute("UPDATE conversations SET leaf = ? WHERE id = ?", (leaf, number))

    def delete(self, number: int) -> None:
        """A conversation with all its messages."""
        with self._transaction() as db:
            db.execute("DELETE FROM conversations WHERE id = ?", (number,))

    def add(self, conversation: int, parent: int | None, role: str, text: str, *, reasoning: str = "",
            calls: Sequence[Mapping[str, Any]] = (), stats: Mapping[str, Any] | None = None, state: str = "done") -> int:
        """A message after `parent`; it becomes the leaf."""
        now = time.time()
        with self._transaction() as db:
            cursor = db.execute(
                "INSERT INTO messages (conversation, parent, role, text, reasoning, calls, stats, state, created_at, updated_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (conversation, parent, role, text, reasoning, json.dumps(list(calls)), json.dumps(dict(stats or {})), state,
                 now, now))
            db.execute("UPDATE conversations SET leaf = ?, updated_at = ? WHERE id = ?",
                       (cursor.lastrowid, now, conversation))
            return cursor.lastrowid or 0

    def write(self, message: int, text: str, reasoning: str, calls: Sequence[Mapping[str, Any]], stats: Mapping[str, Any],
              state: str) -> None:
        """What an answer has become."""
        with self._transaction() as db:
            db.execute("UPDATE messages SET text = ?, reasoning = ?, calls = ?, stats = ?, state = ?, updated_at = ? "
                       "WHERE id = ?",
                       (text, reasoning, json.dumps(list(calls)), json.dumps(dict(stats)), state, time.time(), message))

    def take_back(self, conversation: int, messages: Sequence[int], leaf: int | None) -> None:
        """Remove messages that led to nothing."""
        with self._transaction() as db:
            db.executemany("DELETE FROM messages WHERE id = ? AND conversation = ?",
                           [(number, conversation) for number in messages])
            db.execute("UPDATE conversations SET leaf = ? WHERE id = ?", (leaf, conversation))

    def messages(self, conversation: int) -> list[Message]:
        """All of them, on every branch, by age."""
        rows = self._all("SELECT id, parent, role, text, reasoning, calls, stats, state, created_at FROM messages "
                         "WHERE conversation = ? ORDER BY id", (conversation,))
        return [Message(*row[:5], tuple(_list(row[5])), _object(row[6]), *row[7:]) for row in rows]

    def branch(self, conversation: int) -> list[Message]:
        """The messages of the branch in front, the first first."""
        by_id = {message.id: message for message in self.messages(conversation)}
        found: list[Message] = []
        number = self.conversation(conversation).leaf
        while number in by_id:
            found.append(by_id.pop(number))
            number = found[-1].parent
        return found[::-1]


def siblings(messages: Sequence[Message], message: Message) -> list[Message]:
    """The branches at this message: those with the same parent and role."""
    return [other for other in messages if other.parent == message.parent and other.role == message.role]


def end_of(messages: Sequence[Message], number: int) -> int:
    """The latest leaf below a message."""
    children = [message.id for message in messages if message.parent == number]
    return end_of(messages, children[-1]) if children else number


def _object(text: str) -> dict[str, Any]:
    value = _loaded(text)
    return value if isinstance(value, dict) else {}


def _list(text: str) -> list[Any]:
    value = _loaded(text)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
