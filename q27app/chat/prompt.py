"""A prompt under construction: text in pieces that are either scaffold or content, with two marks.

Scaffold is what a template writes; content is what anybody else wrote. Only scaffold may become control tokens.

    marks          what lies before them
    end_system()   the system block (tools and system text), the same for many conversations
    end_history()  everything that the next turn of this conversation sends again byte for byte
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import ChatRequest

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_OPEN = "<think>\n"
THINK_CLOSED = "<think>\n\n</think>\n\n"
TOOL_CALL_OPEN = "<tool_call>\n"


@dataclass(frozen=True)
class Rendered:
    """A prompt ready for the engine.

    tokens, text   the whole prompt
    stable_len     tokens before the final assistant opener: the next turn begins with the same ones
    system_len     tokens of the system block, 0 if there is none
    channel        where the model's first token belongs: "reasoning" | "text" | "tool"
    """

    tokens: tuple[int, ...]
    text: str
    stable_len: int
    system_len: int
    channel: str


class Template(Protocol):
    """Renders requests for one checkpoint. dialect: how its tool calls are written, "xml" or "json". sorts_keys: whether
    tools and calls are printed with their keys sorted; else as the client has them."""

    name: str
    dialect: str
    sorts_keys: bool

    def render(self, request: ChatRequest, thinking: bool, effort: str | None = None) -> Rendered:
        """The prompt of `request`. effort: "low" | "medium" | "xhigh"; None = the template's default."""
        ...


class PromptBuilder:
    """Collects pieces in order. Owned by one call of `render`."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, bool]] = []
        self._system_mark = 0
        self._history_mark = 0

    def scaffold(self, text: str) -> None:
        self.pieces.append((text, True))

    def content(self, text: str) -> None:
        self.pieces.append((text, False))

    def open_turn(self, role: str) -> None:
        self.scaffold(f"{TURN_START}{role}\n")

    def close_turn(self) -> None:
        self.scaffold(f"{TURN_END}\n")

    def end_system(self) -> None:
        self._system_mark = len(self.pieces)

    def end_history(self) -> None:
        self._history_mark = len(self.pieces)

    def open_answer(self, thinking: bool, forced_tool: bool) -> str:
        """The assistant's opener, after the history. Returns the channel that the model starts in."""
        self.end_history()
        self.open_turn("assistant")
        if forced_tool:
            self.scaffold(THINK_CLOSED + TOOL_CALL_OPEN)
            return "tool"
        self.scaffold(THINK_OPEN if thinking else THINK_CLOSED)
        return "reasoning" if thinking else "text"

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def offsets(self) -> tuple[int, int, int]:
        """UTF-8 bytes of the system block, of everything before the final opener, and of the whole prompt."""
        ends = (self._system_mark, self._history_mark, len(self.pieces))
        return tuple(sum(len(text.encode("utf-8", "replace")) for text, _ in self.pieces[:end]) for end in ends)

    def rendered(self, tokenizer: Tokenizer, channel: str) -> Rendered:
        """Encodes the three sections apart: each begins at a control token, so the result equals the whole."""
        system = tokenizer.encode_pieces(self.pieces[: self._system_mark])
        history = tokenizer.encode_pieces(self.pieces[self._system_mark : self._history_mark])
        opener = tokenizer.encode_pieces(self.pieces[self._history_mark :])
        return Rendered(
            tokens=(*system, *history, *opener),
            text=self.text,
            stable_len=len(system) + len(history),
            system_len=len(system),
            channel=channel,
        )


def render_raw(request: ChatRequest, tokenizer: Tokenizer) -> Rendered | None:
    """The prompt of /v1/completions, raw text or ids as they are; None for a request with messages."""
    prompt = request.prompt
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return Rendered(tuple(tokenizer.encode(prompt, control=True)), prompt, 0, 0, "text")
    return Rendered(tuple(prompt), tokenizer.decode(prompt), 0, 0, "text")
