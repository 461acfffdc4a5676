"""A checkpoint's own chat template, for templates that have no native renderer.

Content must never become control tokens, but the template sees content and scaffold alike. So each control string
inside content is broken by a private character that occurs nowhere else before rendering; after it, control tokens are
matched while the characters are still there, and only then they go. Content without control strings is not touched, so
the template's own text handling (trim, startswith, tojson) sees what it expects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from q27app.chat.conversation import Turn, is_tool_forced, mark_late_system, offered_tools, split_system, turns_of
from q27app.chat.prompt import TOOL_CALL_OPEN, TURN_END, Rendered, render_raw
from q27app.chat.template_sandbox import SandboxedTemplate
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import ChatRequest


def template_messages(turns: Iterable[Turn], system: str | None) -> list[dict[str, Any]]:
    """Messages in the form that chat templates are written for, system text first."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        if turn.role == "system":
            messages.append({"role": "user", "content": mark_late_system(turn.text)})
            continue
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        messages.append(message)
    return messages


class JinjaTemplate:
    """Renders with the source found in the checkpoint. dialect: how it writes calls, see template.open_template."""

    name = "jinja"
    sorts_keys = False

    def __init__(self, tokenizer: Tokenizer, source: str, dialect: str = "xml") -> None:
        self.dialect = dialect
        self._tokenizer = tokenizer
        self._template = SandboxedTemplate(source)
        self._breaker = _Breaker(tokenizer.control_ids, source)

    def render(self, request: ChatRequest, thinking: bool, effort: str | None = None) -> Rendered:
        """See Template. Raises BadRequest with the template's words when it refuses the conversation."""
        raw = render_raw(request, self._tokenizer)
        if raw is not None:
            return raw
        text, stable, mark = self._run(request, thinking, effort)
        thinks = text[stable:].rstrip().endswith("<think>")
        forced = is_tool_forced(request)
        if forced:
            text += ("\n</think>\n\n" if thinks else "") + TOOL_CALL_OPEN
        return self._rendered(text, stable, mark, "tool" if forced else "reasoning" if thinks else "text")

    def plain_text(self, request: ChatRequest, thinking: bool, effort: str | None = None) -> str:
        """What the template itself writes when nobody guards content. Raises BadRequest as `render` does."""
        return self._run(request, thinking, effort, guards=False)[0]

    def _run(
        self, request: ChatRequest, thinking: bool, effort: str | None, guards: bool = True
    ) -> tuple[str, int, str]:
        """(the prompt's text, characters of it before the answer's opener, the private character in it)."""
        system, rest = split_system(request.messages)
        messages = template_messages(turns_of(rest), system)
        declarations = [tool.declaration for tool in offered_tools(request.tools, request.tool_choice)]
        mark = self._breaker.choose(messages, declarations)
        if guards:
            for message in messages:
                _move_reasoning(message)
            messages = [self._breaker.broken_message(message, mark) for message in messages]
            declarations = self._breaker.broken(declarations, mark, whole_only=True)
        variables: dict[str, Any] = {
            "messages": messages,
            "tools": declarations or None,
            "enable_thinking": thinking and not is_tool_forced(request),
            "bos_token": "", "eos_token": TURN_END,
        }
        if effort is not None:
            variables["reasoning_effort"] = effort
        text = self._template.run(add_generation_prompt=True, **variables)
        history = self._template.run(add_generation_prompt=False, **variables)
        return text, len(history) if text.startswith(history) else 0, mark

    def _rendered(self, text: str, stable: int, mark: str, channel: str) -> Rendered:
        system = text.find(f"{TURN_END}\n", 0, stable) if text.startswith("<|im_start|>system") else -1
        system = 0 if system < 0 else system + len(TURN_END) + 1
        sections = (text[:system], text[system:stable], text[stable:])
        ids = [self._tokenizer.encode_pieces(_pieces(section, mark)) for section in sections]
        return Rendered(
            tokens=(*ids[0], *ids[1], *ids[2]),
            text=text.replace(mark, ""),
            stable_len=len(ids[0]) + len(ids[1]),
            system_len=len(ids[0]),
            channel=channel,
        )


def _move_reasoning(message: dict[str, Any]) -> None:
    """Reasoning inside an old answer goes where templates look for it: its tags would not be seen as content."""
    if message["role"] == "assistant" and "reasoning_content" not in message and "</think>" in message["content"]:
        head, _, text = message["content"].rpartition("</think>")
        message["reasoning_content"] = head.split("</think>")[0].split("<think>")[-1].strip("\n")
        message["content"] = text.lstrip("\n")


def _pieces(text: str, mark: str) -> Iterable[tuple[str, bool]]:
    """Scaffold runs between marks; an empty content piece keeps neighbours from joining into a control string."""
    for index, run in enumerate(text.split(mark)):
        if index:
            yield "", False
        yield run, True


class _Breaker:
    """Puts a private character into control strings of content, also where scaffold beside it would complete one."""

    def __init__(self, control_ids: Mapping[str, int], source: str) -> None:
        strings = sorted((text for text in control_ids if len(text) > 1), key=len, reverse=True)
        marked = [text for text in strings if len(text) <= 64]
        ends = sorted({text[-size:] for text in marked for size in range(2, len(text))}, key=len, reverse=True)
        starts = sorted({text[:size] for text in marked for size in range(2, len(text))}, key=len, reverse=True)
        self._whole = re.compile("(?=" + "|".join(map(re.escape, strings)) + ")") if strings else None
        self._head = re.compile("|".join(map(re.escape, ends))) if ends else None
        self._tail = re.compile("(?:" + "|".join(map(re.escape, starts)) + r")\Z") if starts else None
        self._joined = "\n".join(marked)
        self._source = source

    def choose(self, *values: Any) -> str:
        """A private-use character that occurs in none of the values."""
        text = json.dumps(values, ensure_ascii=False)
        return next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text and char not in self._source)

    def broken_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """A message with its strings broken where needed; its role is ours."""
        return {key: value if key == "role" else self._broken_value(key, value, mark) for key, value in message.items()}

    def _broken_value(self, key: str, value: Any, mark: str) -> Any:
        if key != "tool_calls":
            return self.broken(value, mark)
        functions = [{name: self.broken(item, mark) for name, item in call["function"].items()} for call in value]
        return [{"type": "function", "function": function} for function in functions]

    def broken(self, value: Any, mark: str, whole_only: bool = False) -> Any:
        """The same value with every string in it, keys included, broken where needed.

        whole_only: leave strings alone that are only a part of a control string, such as the keys of a declaration.
        """
        if isinstance(value, str):
            return self._break(value, mark, whole_only)
        if isinstance(value, Mapping):
            keys = [self._break(key, mark, whole_only) for key in value]
            return dict(zip(keys, (self.broken(item, mark, whole_only) for item in value.values()), strict=True))
        if isinstance(value, (list, tuple)):
            return [self.broken(item, mark, whole_only) for item in value]
        return value

    def _break(self, text: str, mark: str, whole_only: bool) -> str:
        if self._whole is None or not text:
            return text
        at = {match.start() + 1 for match in self._whole.finditer(text)}
        if not whole_only:
            stripped = text.strip()
            start = len(text) - len(text.lstrip())
            if 1 < len(stripped) <= 64 and "\n" not in stripped and stripped in self._joined:
                at.add(start + 1)
            head = self._head.match(stripped) if self._head else None
            tail = self._tail.search(stripped[-64:]) if self._tail else None
            if head:
                at.add(start + head.end() - 1)
            if tail:
                at.add(start + len(stripped) - len(tail.group()) + 1)
        if not at:
            return text
        cuts = [0, *sorted(at), len(text)]
        return mark.join(text[start:end] for start, end in zip(cuts, cuts[1:], strict=False))
