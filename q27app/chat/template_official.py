"""The chat templates of Qwen3.5 and Qwen3.8, rendered natively: same text and tokens as their jinja source.

Equality is proved in tests on every kind of conversation that the jinja accepts. Where it raises (system text in the
middle, no user query, an unknown effort, arguments that are no object), this renderer goes on, see `render`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from q27app.chat.conversation import Turn, is_tool_forced, mark_late_system, offered_tools, split_system, turns_of
from q27app.chat.prompt import PromptBuilder, Rendered, render_raw
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import ChatRequest, Tool, ToolCall

GENERATIONS = ("qwen3.5", "qwen3.8")

_TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_TOOLS_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n</IMPORTANT>"
)
EFFORT_LINES = {
    "xhigh": (
        "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
        "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
    ),
    "medium": "",
    "low": (
        "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion "
        "without unnecessary elaboration."
    ),
}


def effort_line(effort: str | None) -> str:
    """The sentence that tells the model how long to think; an unknown effort counts as the default, xhigh."""
    return EFFORT_LINES.get(effort or "xhigh", EFFORT_LINES["xhigh"])


class OfficialTemplate:
    """The native renderer. generation: one of GENERATIONS; preserve_thinking: 3.8's switch of the same name."""

    dialect = "xml"
    sorts_keys = False

    def __init__(self, tokenizer: Tokenizer, generation: str, preserve_thinking: bool = True) -> None:
        self.name = generation
        self._tokenizer = tokenizer
        self._is_38 = generation == "qwen3.8"
        self._keeps_all_reasoning = self._is_38 and preserve_thinking

    def render(self, request: ChatRequest, thinking: bool, effort: str | None = None) -> Rendered:
        """See Template. Beyond the jinja: system text after the first turn becomes a marked user turn, a conversation
        without a query counts as one long tool loop, raw arguments become the body of their function block."""
        raw = render_raw(request, self._tokenizer)
        if raw is not None:
            return raw
        prompt, channel = self.build(request, thinking, effort)
        return prompt.rendered(self._tokenizer, channel)

    def build(self, request: ChatRequest, thinking: bool, effort: str | None) -> tuple[PromptBuilder, str]:
        """The prompt in pieces and the channel that the answer starts in."""
        forced = is_tool_forced(request)
        thinking = thinking and not forced
        prompt = PromptBuilder()
        system, messages = split_system(request.messages)
        instructions = effort_line(effort) if self._is_38 and thinking else ""
        self._system(prompt, system, offered_tools(request.tools, request.tool_choice), instructions)
        prompt.end_system()
        self._turns(prompt, turns_of(messages), has_system=system is not None)
        return prompt, prompt.open_answer(thinking, forced)

    def _system(self, prompt: PromptBuilder, system: str | None, tools: Sequence[Tool], instructions: str) -> None:
        text = (system or "").strip()
        if tools:
            prompt.open_turn("system")
            prompt.scaffold((f"{instructions}\n\n" if instructions else "") + _TOOLS_HEAD)
            for tool in tools:
                prompt.scaffold("\n")
                prompt.content(json.dumps(tool.declaration, ensure_ascii=False))
            prompt.scaffold(_TOOLS_TAIL)
            if text:
                prompt.scaffold("\n\n")
                prompt.content(text)
            prompt.close_turn()
        elif text or instructions or (system is not None and not self._is_38):
            prompt.open_turn("system")
            prompt.scaffold(instructions + ("\n\n" if instructions and text else ""))
            prompt.content(text)
            prompt.close_turn()

    def _turns(self, prompt: PromptBuilder, turns: list[Turn], has_system: bool) -> None:
        last_query = _last_query(turns)
        for index, turn in enumerate(turns):
            if turn.role == "assistant":
                self._assistant(prompt, turn, self._keeps_all_reasoning or index > last_query)
            elif turn.role == "tool":
                # A result that opens the conversation gets no turn of its own in the jinja; with no query, it raises.
                opens = index > 0 or has_system or last_query < 0
                if opens and (index == 0 or turns[index - 1].role != "tool"):
                    prompt.scaffold("<|im_start|>user")
                prompt.scaffold("\n<tool_response>\n")
                prompt.content(turn.text.strip())
                prompt.scaffold("\n</tool_response>")
                if index + 1 == len(turns) or turns[index + 1].role != "tool":
                    prompt.close_turn()
            else:
                prompt.open_turn("user")
                prompt.content(mark_late_system(turn.text) if turn.role == "system" else turn.text.strip())
                prompt.close_turn()

    def _assistant(self, prompt: PromptBuilder, turn: Turn, keeps_reasoning: bool) -> None:
        text, reasoning = turn.text.strip(), turn.reasoning
        if reasoning is None and not self._is_38 and "</think>" in text:
            reasoning = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            text = text.split("</think>")[-1].lstrip("\n")
        prompt.open_turn("assistant")
        if keeps_reasoning:
            prompt.scaffold("<think>\n")
            prompt.content((reasoning or "").strip())
            prompt.scaffold("\n</think>\n\n")
        prompt.content(text)
        for index, call in enumerate(turn.calls):
            if index:
                prompt.scaffold("\n")
            elif text.strip():
                prompt.scaffold("\n\n")
            self._call(prompt, call)
        prompt.close_turn()

    def _call(self, prompt: PromptBuilder, call: ToolCall) -> None:
        prompt.scaffold("<tool_call>\n<function=")
        prompt.content(call.name)
        prompt.scaffold(">\n")
        if isinstance(call.arguments, dict):
            for key, value in call.arguments.items():
                prompt.scaffold("<parameter=")
                prompt.content(key)
                prompt.scaffold(">\n")
                prompt.content(self._argument(value))
                prompt.scaffold("\n</parameter>\n")
        elif call.arguments:
            prompt.content(call.arguments)
            prompt.scaffold("\n")
        prompt.scaffold("</function>\n</tool_call>")

    def _argument(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if self._is_38 or isinstance(value, (dict, list, tuple)):
            return json.dumps(value, ensure_ascii=False)
        return str(value)


def _last_query(turns: list[Turn]) -> int:
    """Index of the last user turn that asks something, -1 if there is none. Reasoning after it is always kept."""
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if turn.role == "user" and turn.is_query:
            text = turn.text.strip()
            if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                return index
    return -1
