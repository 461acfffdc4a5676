"""Output of the Responses dialect: the items of an answer, whole or event by event.

A stream: response.created, response.in_progress, the items one after the other, and exactly one of response.completed,
response.incomplete, response.failed. Every event has the next sequence_number, from 0. `keepalive` fills silence.

    item               events between response.output_item.added and response.output_item.done
    message            content_part.added, output_text.delta*, output_text.done, content_part.done
    reasoning          reasoning_summary_part.added, reasoning_summary_text.delta*, ..._text.done, ..._part.done
    function_call      function_call_arguments.delta*, function_call_arguments.done
    custom_tool_call   custom_tool_call_input.delta*, custom_tool_call_input.done
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from q27app.chat.types import Delta, ToolCall, Usage
from q27app.daemon.answer import Answer, CallBlock
from q27app.daemon.failures import explained
from q27app.daemon.identity import Identity
from q27app.daemon.responses_tools import INPUT
from q27app.daemon.sse import event
from q27app.errors import Q27Error

Item = dict[str, Any]


def usage_of(usage: Usage) -> dict[str, Any]:
    """The dialect's usage object."""
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }


def render(identity: Identity, answer: Answer) -> dict[str, Any]:
    """The reply to a request without stream."""
    output: list[Item] = []
    if answer.reasoning:
        status = "incomplete" if answer.is_cut and not answer.blocks else "completed"
        output.append(_reasoning(identity, len(output), answer.reasoning, status))
    logprobs = answer.logprobs
    for index, block in enumerate(answer.blocks):
        is_last = index == len(answer.blocks) - 1
        if isinstance(block, CallBlock):
            output.append(_call(identity, len(output), block, "completed"))
        else:
            status = "incomplete" if answer.is_cut and is_last else "completed"
            output.append(_message(identity, len(output), [_text(block, logprobs)], status))
            logprobs = []
    if not output or not (answer.blocks or answer.is_cut):
        output.append(_message(identity, len(output), [_text("")], "incomplete" if answer.is_cut else "completed"))
    is_incomplete = answer.is_cut and not (answer.blocks and isinstance(answer.blocks[-1], CallBlock))
    return _ended(identity, output, answer.usage, is_incomplete)


def _ended(identity: Identity, output: list[Item], usage: Usage, is_incomplete: bool) -> dict[str, Any]:
    response = _response(identity, "incomplete" if is_incomplete else "completed", output)
    response["usage"] = usage_of(usage)
    if is_incomplete:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    else:
        response["completed_at"] = identity.created
    return response


def _response(identity: Identity, status: str, output: list[Item]) -> dict[str, Any]:
    chat = identity.chat
    return {
        "id": f"resp_{identity.id}",
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": chat.sampling.max_tokens,
        "metadata": {},
        "model": identity.model,
        "output": output,
        "parallel_tool_calls": chat.tool_choice.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": chat.sampling.temperature,
        "tool_choice": chat.tool_choice.mode,
        "tools": [],
        "top_p": chat.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


# ---------------------------------------------------------------------------- items


def _text(text: str, logprobs: Any = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _message(identity: Identity, index: int, content: list[Item], status: str) -> Item:
    return {
        "type": "message",
        "id": f"msg_{identity.id}_{index}",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _reasoning(identity: Identity, index: int, text: str, status: str) -> Item:
    summary = [{"type": "summary_text", "text": text}] if text else []
    item_id = f"rs_{identity.id}_{index}"
    return {"type": "reasoning", "id": item_id, "status": status, "summary": summary, "encrypted_content": None}


def _wire(identity: Identity, name: str) -> tuple[str, str, str]:
    """(kind, the client's name, namespace) of the tool that the model calls `name`."""
    wire = next((tool.wire for tool in identity.chat.tools if tool.name == name), ())
    return (wire[0], wire[1], wire[2]) if wire else ("function", name, "")


def _call(identity: Identity, index: int, block: CallBlock, status: str) -> Item:
    kind, name, namespace = _wire(identity, block.name)
    item: Item = {"call_id": block.id, "status": status, "name": name}
    if namespace:
        item["namespace"] = namespace
    if kind == "custom":
        raw = _free_text(block) if status == "completed" else ""
        return {"type": "custom_tool_call", "id": f"ctc_{identity.id}_{index}", **item, "input": raw}
    arguments = block.arguments if status == "completed" else ""
    return {"type": "function_call", "id": f"fc_{identity.id}_{index}", **item, "arguments": arguments}


def _free_text(block: CallBlock) -> str:
    """The `input` of a call of a free-text tool; all its arguments as JSON where it has none."""
    value = block.parsed.get(INPUT) if isinstance(block.parsed, dict) else None
    return value if isinstance(value, str) else json.dumps(block.parsed, ensure_ascii=False)


# ---------------------------------------------------------------------------- events


async def events(identity: Identity, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
    """The stream, event by event. An error out of `deltas` is told as response.failed and raised again."""
    stream = _Stream(identity)
    try:
        async for delta in deltas:
            chunk = stream.feed(delta)
            if chunk:
                yield chunk
    except Exception as error:
        failure = explained(error, identity.id)
        yield stream.fail(failure)
        if failure is error:
            raise
        raise failure from error


class _Stream:
    """Which item is open, what has been said. Methods return the bytes to send."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._number = 0
        self._output: list[Item] = []
        self._kind = ""
        """The item that is open: "text", "reasoning", "call" or ""."""
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []
        self._open_id = ""
        self._block = CallBlock("", "")

    def feed(self, delta: Delta) -> bytes:
        if delta.kind == "start":
            response = {"response": _response(self._identity, "in_progress", [])}
            return self._event("response.created", response) + self._event("response.in_progress", response)
        if delta.kind == "ping":
            return self._event("keepalive", {})
        if delta.kind == "text":
            return self._text(delta)
        if delta.kind == "reasoning":
            return self._reason(delta.text)
        if delta.kind == "finish":
            return self._finish(delta)
        assert delta.call is not None
        return self._call(delta, delta.call)

    def fail(self, error: Q27Error) -> bytes:
        """The terminal event of an answer that failed. What was open stays open."""
        response = _response(self._identity, "failed", self._output)
        response["error"] = {"code": error.code, "message": str(error)}
        return self._event("response.failed", {"response": response})

    def _event(self, name: str, payload: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(name, {"type": name, "sequence_number": number, **payload})

    def _in_item(self, name: str, part: str, payload: dict[str, Any]) -> bytes:
        """An event inside the open item. part: "content_index", "summary_index" or ""."""
        place = {"item_id": self._open_id, "output_index": len(self._output), **({part: 0} if part else {})}
        return self._event(f"response.{name}", {**place, **payload})

    def _open(self, kind: str, item: Item) -> bytes:
        self._kind, self._open_id, self._pieces, self._logprobs = kind, item["id"], [], []
        return self._event("response.output_item.added", {"output_index": len(self._output), "item": item})

    def _done(self, item: Item) -> bytes:
        done = self._event("response.output_item.done", {"output_index": len(self._output), "item": item})
        self._output.append(item)
        self._kind = ""
        return done

    def _text(self, delta: Delta) -> bytes:
        chunk = b""
        if self._kind != "text":
            chunk = self._close() + self._open(
                "text", _message(self._identity, len(self._output), [], "in_progress")
            )
            chunk += self._in_item("content_part.added", "content_index", {"part": _text("")})
        if not delta.text:
            return chunk
        self._pieces.append(delta.text)
        self._logprobs += delta.logprobs
        payload = {"delta": delta.text, "logprobs": list(delta.logprobs)}
        return chunk + self._in_item("output_text.delta", "content_index", payload)

    def _reason(self, text: str) -> bytes:
        chunk = b""
        if self._kind != "reasoning":
            item = _reasoning(self._identity, len(self._output), "", "in_progress")
            part = {"part": {"type": "summary_text", "text": ""}}
            chunk = self._close() + self._open("reasoning", item)
            chunk += self._in_item("reasoning_summary_part.added", "summary_index", part)
        self._pieces.append(text)
        return chunk + self._in_item("reasoning_summary_text.delta", "summary_index", {"delta": text})

    def _close(self, is_cut: bool = False) -> bytes:
        """End the open text or reasoning."""
        text, status = "".join(self._pieces), "incomplete" if is_cut else "completed"
        if self._kind == "text":
            part = _text(text, self._logprobs)
            chunk = self._in_item(
                "output_text.done", "content_index", {"text": text, "logprobs": self._logprobs}
            ) + self._in_item("content_part.done", "content_index", {"part": part})
            return chunk + self._done(_message(self._identity, len(self._output), [part], status))
        if self._kind == "reasoning":
            part = {"type": "summary_text", "text": text}
            chunk = self._in_item("reasoning_summary_text.done", "summary_index", {"text": text}) + self._in_item(
                "reasoning_summary_part.done", "summary_index", {"part": part}
            )
            return chunk + self._done(_reasoning(self._identity, len(self._output), text, status))
        return b""

    def _call(self, delta: Delta, call: ToolCall) -> bytes:
        index, is_custom = len(self._output), _wire(self._identity, call.name)[0] == "custom"
        if delta.kind == "tool_start":
            self._block = CallBlock(call.id, call.name)
            closing = self._close()
            return closing + self._open("call", _call(self._identity, len(self._output), self._block, "in_progress"))
        if delta.kind == "tool_args":
            self._block.pieces.append(delta.text)
            is_shown = not is_custom and delta.text
            return self._in_item("function_call_arguments.delta", "", {"delta": delta.text}) if is_shown else b""
        self._block.parsed = call.arguments
        item = _call(self._identity, index, self._block, "completed")
        if is_custom:
            chunk = self._in_item("custom_tool_call_input.delta", "", {"delta": item["input"]})
            chunk += self._in_item("custom_tool_call_input.done", "", {"input": item["input"]})
        else:
            payload = {"name": item["name"], "arguments": item["arguments"]}
            chunk = self._in_item("function_call_arguments.done", "", payload)
        return chunk + self._done(item)

    def _finish(self, delta: Delta) -> bytes:
        chunk = self._close(delta.is_cut)
        last = self._output[-1]["type"] if self._output else ""
        if not last or last == "reasoning" and not delta.is_cut:
            chunk += self._text(Delta("text")) + self._close(delta.is_cut)
        is_incomplete = delta.is_cut and not last.endswith("call")
        response = _ended(self._identity, self._output, delta.usage or Usage(), is_incomplete)
        return chunk + self._event(f"response.{response['status']}", {"response": response})
