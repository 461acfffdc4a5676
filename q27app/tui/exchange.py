"""Conversations as files: JSON with every branch, Markdown with the branch in front. Both are read back.

Markdown: a comment line `<!-- q27app:message {"role": ...} -->` heads each message, so that a text may hold any heading; a line
of a text that looks like such a comment gets a backslash (`<!-- \\q27app:`), which reading takes away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from q27app.errors import FileFormatError
from q27app.tui.history import STATES, Conversation, History, Message
from q27app.tui.snapshot import clean

FORMAT = "q27app-conversation"
MAX_BYTES = 64 << 20
MAX_MESSAGES = 100_000
ROLES = ("user", "assistant", "system")
_MARK = re.compile(r"^<!-- q27app:(title|message) (\{.*\}) -->$")
_LOOKS_LIKE = re.compile(r"^<!-- (\\*)q27app:")


def to_json(conversation: Conversation, messages: Sequence[Message]) -> str:
    """The whole tree."""
    places = {message.id: index for index, message in enumerate(messages)}
    entries = [
        {"parent": places.get(message.parent) if message.parent is not None else None, "role": message.role, "text": message.text,
         "reasoning": message.reasoning, "calls": list(message.calls), "stats": dict(message.stats), "state": message.state}
        for message in messages
    ]
    leaf = places.get(conversation.leaf) if conversation.leaf is not None else None
    return json.dumps({"format": FORMAT, "version": 1, "title": conversation.title, "settings": dict(conversation.settings),
                       "leaf": leaf, "messages": entries}, indent=1, ensure_ascii=False) + "\n"


def to_markdown(conversation: Conversation, branch: Sequence[Message]) -> str:
    """The branch in front."""
    parts = [f"<!-- q27app:title {json.dumps({'title': conversation.title}, ensure_ascii=False)} -->\n"]
    for message in branch:
        facts = {"role": message.role, "state": message.state, "stats": dict(message.stats), "calls": list(message.calls)}
        for kind, text in (("reasoning", message.reasoning), ("text", message.text)):
            if text or kind == "text":
                shown = facts if kind == "text" else {"role": message.role}
                head = json.dumps({**shown, "part": kind}, ensure_ascii=False)
                parts.append(f"<!-- q27app:message {head} -->\n{_escaped(text)}\n")
    return "".join(parts)


def _escaped(text: str) -> str:
    return "\n".join(_LOOKS_LIKE.sub(r"<!-- \1\\q27app:", line) for line in text.split("\n"))


def _unescaped(text: str) -> str:
    return "\n".join(re.sub(r"^<!-- (\\*)\\q27app:", r"<!-- \1q27app:", line) for line in text.split("\n"))


def load(history: History, text: str, name: str) -> int:
    """Read either kind into the history; the new conversation's id. name: of the file, for errors. Raises FileFormatError."""
    if text.lstrip()[:1] == "{":
        title, settings, leaf, entries = _from_json(text, name)
    else:
        title, settings, leaf, entries = _from_markdown(text, name)
    number = history.create(title or "imported", settings)
    ids: list[int] = []
    for entry in entries:
        parent = None if entry["parent"] is None else ids[entry["parent"]]
        ids.append(history.add(number, parent, entry["role"], entry["text"], reasoning=entry["reasoning"], calls=entry["calls"],
                               stats=entry["stats"], state=entry["state"]))
    if leaf is not None:
        history.change(number, leaf=ids[leaf])
    return number


_Read = tuple[str, dict[str, Any], int | None, list[dict[str, Any]]]


def _from_json(text: str, name: str) -> _Read:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{name}: not JSON: {clean(error)}.") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FileFormatError(f"{name}: not a conversation of q27app: \"format\" is not {FORMAT!r}.")
    if value.get("version") != 1:
        raise FileFormatError(f"{name}: version {clean(value.get('version'), 20)!r} of the format, this q27app reads 1.")
    raw = value.get("messages")
    if not isinstance(raw, list) or len(raw) > MAX_MESSAGES:
        raise FileFormatError(f"{name}: \"messages\" is no list of at most {MAX_MESSAGES} messages.")
    entries = [_entry(entry, index, name) for index, entry in enumerate(raw)]
    leaf = value.get("leaf")
    if isinstance(leaf, bool) or not (leaf is None or isinstance(leaf, int) and 0 <= leaf < len(entries)):
        raise FileFormatError(f"{name}: \"leaf\" is {clean(leaf, 40)!r}, expected the number of a message.")
    settings = value.get("settings")
    return clean(value.get("title")), settings if isinstance(settings, dict) else {}, leaf, entries


def _entry(raw: Any, index: int, name: str) -> dict[str, Any]:
    where = f"{name}: message {index}"
    if not isinstance(raw, dict) or raw.get("role") not in ROLES or not isinstance(raw.get("text"), str):
        raise FileFormatError(f"{where}: expected an object with a role of {', '.join(ROLES)} and a text.")
    parent = raw.get("parent")
    if isinstance(parent, bool) or not (parent is None or isinstance(parent, int) and 0 <= parent < index):
        raise FileFormatError(f"{where}: parent is {clean(parent, 40)!r}, expected the number of a message before it.")
    return {"parent": parent, "role": raw["role"], "text": raw["text"], **_extras(raw)}


def _extras(raw: Mapping[str, Any]) -> dict[str, Any]:
    calls, stats, state = raw.get("calls"), raw.get("stats"), raw.get("state")
    return {
        "reasoning": raw["reasoning"] if isinstance(raw.get("reasoning"), str) else "",
        "calls": [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [],
        "stats": stats if isinstance(stats, dict) else {},
        "state": state if state in STATES and state != "streaming" else "done",
    }


def _from_markdown(text: str, name: str) -> _Read:
    title, reasoning = "", ""
    entries: list[dict[str, Any]] = []
    facts: dict[str, Any] | None = None
    lines: list[str] = []

    def close() -> None:
        nonlocal reasoning
        if facts is None:
            return
        body = _unescaped("\n".join(lines))
        if facts.get("part") == "reasoning":
            reasoning = body
        else:
            raw = {**facts, "text": body, "reasoning": reasoning, "parent": len(entries) - 1 if entries else None}
            entries.append(_entry(raw, len(entries), name))
            reasoning = ""

    for line in text.removesuffix("\n").split("\n"):
        mark = _MARK.match(line)
        if mark is None:
            lines.append(line)
            continue
        try:
            head = json.loads(mark[2])
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{name}: the mark {line[:80]!r} holds no JSON.") from error
        if mark[1] == "title":
            title = clean(head.get("title"))
            continue
        close()
        facts, lines = head, []
    close()
    if not entries:
        raise FileFormatError(f"{name}: no conversation: there is no line <!-- q27app:message ... -->.",
                              "Import what /export has written, or q27app's JSON.")
    return title, {}, len(entries) - 1, entries
