"""The rendering for checkpoints that carry no template of their own, in two tool dialects.

"json": calls are {"name", "arguments"} objects. "xml": function and parameter tags. Every assistant turn has a think
block, so a turn renders the same whether it is the last or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from q27app.chat.conversation import calls_of, is_tool_forced, offered_tools, reasoning_of, split_system, text_of
from q27app.chat.prompt import PromptBuilder, Rendered, render_raw
from q27app.chat.template_official import EFFORT_LINES, effort_line
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import ChatRequest, Message, Tool, ToolCall, ToolChoice, ToolResultPart, TextPart

DEFAULT_SYSTEM = "You are a helpful assistant."

_TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_FORMS = {
    "json": (
        "For each function call, return a JSON object with the function name and arguments inside "
        "<tool_call></tool_call> tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\n<IMPORTANT>\n'
    ),
    "xml": (
        "For each function call, emit it inside <tool_call></tool_call> tags using this exact format with NO suffix:\n"
        "\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nmulti-line values are\nallowed\n</parameter>\n</function>\n</tool_call>\n\n"
        "<IMPORTANT>\n"
    ),
}
_TOOLS_TAIL = (
    "- Required parameters MUST be specified.\n"
    "- You may provide optional reasoning before the function call, but never after it.\n"
    "- If no function call is needed, answer normally and do not mention the tool interface.\n</IMPORTANT>"
)
_RENDERED_THINK = re.compile(r"(?:<(think|thinking)>.*?</\1>|</think>|</thinking>)\n*", re.DOTALL)
"""Reasoning at the head of an assistant's content, or a closer left of it."""


class JsonTemplate:
    """dialect: "json" or "xml"; is_38: the effort line appears whenever thinking is on, else only when asked for."""

    sorts_keys = True

    def __init__(self, tokenizer: Tokenizer, dialect: str = "json", is_38: bool = False) -> None:
        self.name = dialect
        self.dialect = dialect
        self._tokenizer = tokenizer
        self._is_38 = is_38

    def render(self, request: ChatRequest, thinking: bool, effort: str | None = None) -> Rendered:
        """See Template. System text after the first turn stays a system turn in its place."""
        raw = render_raw(request, self._tokenizer)
        if raw is not None:
            return raw
        prompt, channel = self.build(request, thinking, effort)
        return prompt.rendered(self._tokenizer, channel)

    def build(self, request: ChatRequest, thinking: bool, effort: str | None) -> tuple[PromptBuilder, str]:
        """The prompt in pieces and the channel that the answer starts in."""
        forced = is_tool_forced(request)
        thinking = thinking and not forced
        has_line = thinking and (self._is_38 or effort in EFFORT_LINES)
        prompt = PromptBuilder()
        system, messages = split_system(request.messages)
        prompt.open_turn("system")
        if has_line and effort_line(effort):
            prompt.scaffold(effort_line(effort) + "\n\n")
        tools = offered_tools(request.tools, request.tool_choice)
        if tools:
            self._tools(prompt, tools)
            prompt.scaffold("\n\n")
        prompt.content(system or DEFAULT_SYSTEM)
        if forced:
            prompt.scaffold("\n\n")
            prompt.content(_choice_sentence(request.tool_choice))
        prompt.close_turn()
        prompt.end_system()
        self._messages(prompt, messages)
        return prompt, prompt.open_answer(thinking, forced)

    def _tools(self, prompt: PromptBuilder, tools: Sequence[Tool]) -> None:
        prompt.scaffold(_TOOLS_HEAD)
        for tool in tools:
            function = {"description": tool.description, "name": tool.name, "parameters": tool.parameters}
            prompt.scaffold("\n")
            prompt.content(_compact({"function": function, "type": "function"}))
        prompt.scaffold("\n</tools>\n\n" + _FORMS[self.dialect] + _TOOLS_TAIL)

    def _messages(self, prompt: PromptBuilder, messages: Sequence[Message]) -> None:
        after_results = False
        for index, message in enumerate(messages):
            if message.role == "assistant":
                self._assistant(prompt, message)
            elif message.role == "system":
                prompt.open_turn("system")
                prompt.content(text_of(message))
                prompt.close_turn()
            else:
                starts = _starts_with_result(message)
                if starts and after_results:
                    prompt.scaffold("\n")
                else:
                    prompt.open_turn("user")
                _user_parts(prompt, message)
                following = messages[index + 1] if index + 1 < len(messages) else None
                after_results = starts and following is not None and _starts_with_result(following)
                if not after_results:
                    prompt.close_turn()

    def _assistant(self, prompt: PromptBuilder, message: Message) -> None:
        text = _RENDERED_THINK.sub("", text_of(message), count=1) if _has_think_head(message) else text_of(message)
        prompt.open_turn("assistant")
        prompt.scaffold("<think>\n")
        prompt.content(reasoning_of(message) or "")
        prompt.scaffold("\n</think>\n\n")
        prompt.content(text)
        ends_line = not text or text.endswith("\n")
        for call in calls_of(message):
            prompt.scaffold(("" if ends_line else "\n") + "<tool_call>\n")
            self._call(prompt, call)
            prompt.scaffold("\n</tool_call>")
            ends_line = False
        prompt.close_turn()

    def _call(self, prompt: PromptBuilder, call: ToolCall) -> None:
        arguments = call.arguments
        if self.dialect == "json":
            text = arguments if isinstance(arguments, str) else _compact(arguments)
            prompt.content(f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {text}}}')
            return
        prompt.scaffold("<function=")
        prompt.content(call.name)
        prompt.scaffold(">\n")
        if isinstance(arguments, str):
            prompt.content(arguments)
            prompt.scaffold("\n")
        else:
            for key in sorted(arguments):
                value = arguments[key]
                prompt.scaffold("<parameter=")
                prompt.content(key)
                prompt.scaffold(">\n")
                prompt.content(value if isinstance(value, str) else _compact(value))
                prompt.scaffold("\n</parameter>\n")
        prompt.scaffold("</function>")


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _choice_sentence(choice: ToolChoice) -> str:
    if len(choice.names) == 1:
        return f'Only the tool "{choice.names[0]}" may be called, and it must be called before the answer ends.'
    return "At least one available tool must be called before the answer ends."


def _has_think_head(message: Message) -> bool:
    return _RENDERED_THINK.match(text_of(message)) is not None


def _starts_with_result(message: Message) -> bool:
    """True for a message of results, also one that is written out as text by a client."""
    if message.role not in ("user", "tool"):
        return False
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            return True
        if isinstance(part, TextPart) and part.text:
            return part.text.startswith("<tool_response>")
    return False


def _user_parts(prompt: PromptBuilder, message: Message) -> None:
    """Text and results in order; a result begins on a line of its own, text follows it directly."""
    ends_line = True
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            prompt.scaffold(("" if ends_line else "\n") + "<tool_response>\n")
            prompt.content(part.text)
            prompt.scaffold("\n</tool_response>")
            ends_line = False
        elif isinstance(part, TextPart) and part.text:
            prompt.content(part.text)
            ends_line = part.text.endswith("\n")
