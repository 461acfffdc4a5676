"""The waist of the hourglass: the HTTP dialects above, one model below. Plain frozen data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made. arguments: a JSON object as a dict, or the raw text if it is not one."""

    id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True)
class ToolCallPart:
    call: ToolCall


@dataclass(frozen=True)
class ToolResultPart:
    text: str
    call_id: str = ""
    is_error: bool = False


Part = TextPart | ReasoningPart | ToolCallPart | ToolResultPart


@dataclass(frozen=True)
class Message:
    """One turn. Order of parts is kept. A user message may hold tool results and text (Anthropic)."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Tool:
    """A declared function. `declaration` is the object that the template prints, in OpenAI's form
    {"type": "function", "function": {"name", "description", "parameters"}} with the client's key order and extra keys."""

    name: str
    description: str
    parameters: dict[str, Any]
    declaration: dict[str, Any]
    wire: tuple[str, ...] = ()
    """What the dialect needs to hand a call back in the client's terms; nobody else reads it."""


@dataclass(frozen=True)
class ToolChoice:
    """auto | none | required (any of `names`, or all if empty); names restrict what is offered."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True)
class Thinking:
    """enabled: None = server default. effort: "low" | "medium" | "xhigh" | None. budget: tokens, None = default, -1 = none."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Sampling:
    """Fields that the client gave; None = server default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """What any dialect asks for. `prompt` is set instead of messages by /v1/completions (raw text)."""

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    more_prompts: tuple[str | tuple[int, ...], ...] = ()
    """Further raw prompts, each answered by itself; the answers to the first come first."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: Thinking = field(default_factory=Thinking)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    model: str = ""
    answer_schema: dict[str, Any] | None = None
    """JSON schema that the answer's text must keep to; None = any text."""
    num_choices: int = 1
    """How many answers to each prompt are asked for."""
    dialect: str = ""
    """ "messages" | "chat" | "completions" | "responses" """
    prefix_parts: tuple[str, ...] = ()
    """Reserved for the prefix cache: fingerprints of history messages."""

    @property
    def num_answers(self) -> int:
        """How many answers are asked for in all."""
        return self.num_choices * (1 + len(self.more_prompts))


@dataclass(frozen=True)
class Usage:
    """Tokens. num_cached is part of num_prompt; num_reasoning is part of num_generated."""

    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_reasoning: int = 0


@dataclass(frozen=True)
class Delta:
    """A piece of an answer, in order.

    kind       "start"      prompt accepted; usage.num_prompt is set
               "ping"       nothing happened for a while (prefill, queue)
               "reasoning"  text
               "text"       text
               "tool_start" call: id and name
               "tool_args"  call id, text: a piece of the arguments' JSON text
               "tool_end"   call: complete, with parsed arguments
               "finish"     finish: "stop" | "length" | "tool_calls" | "stop_sequence"; usage; stats
    An answer that fails after "start" ends with an exception out of the iterator, not with a Delta.
    """

    kind: str
    text: str = ""
    call: ToolCall | None = None
    finish: str | None = None
    stop_sequence: str | None = None
    usage: Usage | None = None
    logprobs: tuple = ()
    stats: Any = None
    index: int = 0
    """Which of several answers it belongs to."""
    is_cut: bool = False
    """Of "finish": a limit ended the generation, whatever `finish` says."""
