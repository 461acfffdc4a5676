"""The legal orders of a Responses stream as a state machine, written from the protocol and not from the code."""

from __future__ import annotations

import json
from typing import Any

TERMINAL = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
DELTAS = {
    "message": ("output_text.delta", "delta"),
    "reasoning": ("reasoning_summary_text.delta", "delta"),
    "function_call": ("function_call_arguments.delta", "delta"),
    "custom_tool_call": ("custom_tool_call_input.delta", "delta"),
}
PARTS = {
    "message": ("content_part.added", "output_text.done", "content_part.done", "text", "content_index"),
    "reasoning": (
        "reasoning_summary_part.added", "reasoning_summary_text.done", "reasoning_summary_part.done", "text",
        "summary_index",
    ),
    "function_call": ("", "function_call_arguments.done", "", "arguments", ""),
    "custom_tool_call": ("", "custom_tool_call_input.done", "", "input", ""),
}


def read(stream: str) -> list[dict[str, Any]]:
    """The events of a stream; the event line agrees with the data's type."""
    events = []
    for block in stream.split("\n\n"):
        if not block.strip() or block.startswith(":"):
            continue
        name, data = block.split("\n", 1)
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append(value)
    return events


class Checker:
    """Feed it every event; `result` is the terminal event's response."""

    def __init__(self) -> None:
        self.state, self.number, self.result = "start", 0, None
        self.items: list[dict[str, Any]] = []
        self.item: dict[str, Any] = {}
        self.text = ""

    def check(self, stream: str) -> dict[str, Any]:
        for value in read(stream):
            self.feed(value)
        assert self.state == "ended", f"the stream ended in state {self.state}"
        return self.result

    def feed(self, value: dict[str, Any]) -> None:
        kind = value["type"]
        assert self.state != "ended", f"{kind} after the end"
        assert value["sequence_number"] == self.number
        self.number += 1
        if kind == "keepalive":
            return
        if kind in TERMINAL:
            self._end(value)
        elif self.state == "start":
            assert kind == "response.created" and value["response"]["status"] == "in_progress"
            self.state = "created"
        elif self.state == "created":
            assert kind == "response.in_progress"
            self.state = "between"
        elif self.state == "between":
            self._open(value)
        else:
            self._inside(value, kind.removeprefix("response."))

    def _open(self, value: dict[str, Any]) -> None:
        assert value["type"] == "response.output_item.added", value
        assert value["output_index"] == len(self.items)
        assert value["item"]["status"] == "in_progress" and value["item"]["id"]
        assert value["item"]["id"] not in [item["id"] for item in self.items]
        self.item, self.text = value["item"], ""
        self.state = "part" if PARTS[self.item["type"]][0] else "deltas"

    def _inside(self, value: dict[str, Any], kind: str) -> None:
        added, done, closed, key, index = PARTS[self.item["type"]]
        assert value["output_index"] == len(self.items)
        if self.state == "closing":
            assert kind == "output_item.done"
            self._close(value["item"], key)
            return
        assert value["item_id"] == self.item["id"] and (not index or value[index] == 0)
        if self.state == "part":
            assert kind == added
            self.state = "deltas"
        elif self.state == "deltas" and kind == DELTAS[self.item["type"]][0]:
            assert value["delta"]
            self.text += value["delta"]
        elif self.state == "deltas":
            assert kind == done and value[key] == self.text
            self.state = "part_done" if closed else "closing"
        else:
            assert kind == closed and value["part"]["text"] == self.text
            self.state = "closing"

    def _close(self, item: dict[str, Any], key: str) -> None:
        kind = self.item["type"]
        parts = item["content"] if kind == "message" else item["summary"] if kind == "reasoning" else [item]
        assert [part[key] for part in parts] == [self.text]
        assert (item["type"], item["id"]) == (kind, self.item["id"])
        assert item["status"] in ("completed", "incomplete")
        self.items.append(item)
        self.state = "between"

    def _end(self, value: dict[str, Any]) -> None:
        response, status = value["response"], TERMINAL[value["type"]]
        assert response["status"] == status and response["output"] == self.items
        if status == "failed":
            assert self.state != "start" and response["error"]["message"]
        else:
            assert self.state == "between" and response["usage"]["total_tokens"] > 0
        assert (response["incomplete_details"] is not None) == (status == "incomplete")
        self.state, self.result = "ended", response
