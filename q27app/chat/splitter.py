"""Cuts an answer's text into channels as it arrives: reasoning, text, and wrapped tool calls.

    channel     looks for                              and then
    text        <think>, <tool_call>, </tool_call>     opens reasoning, opens a call, drops a closer that closes nothing
    reasoning   </think>                               back to text
    tool        the end of the body (tool_body.py)     back to text

In text a marker that is only shown (display.py) is text. The end of the buffer is held back while it may be the
beginning of a marker. The segments, joined by kind, do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from q27app.chat.display import DisplayContext
from q27app.chat.tool_body import CLOSE, OPEN, BodyScanner, partial_marker
from q27app.chat.tool_calls import parse_json_calls

THINK, THINK_END = "<think>", "</think>"
SLICE = 4096
"""Characters that are looked at in one go: cutting pieces off the buffer stays cheap."""
MAX_RETRIES = 8
"""How often a malformed body is cut again at a closer inside it: keeps the time linear."""


@dataclass(frozen=True)
class Segment:
    """kind: "text" | "reasoning" | "call". A call's text is its body, raw what the model wrote for it with its markers.

    is_closed: False if the generation ended inside the wrapper.
    """

    kind: str
    text: str
    raw: str = ""
    is_closed: bool = True


class Splitter:
    """channel: where the text starts. has_tools: False if tool markers are plain text."""

    def __init__(self, channel: str, has_tools: bool) -> None:
        self.channel = channel
        self._has_tools = has_tools
        words = (THINK, OPEN, CLOSE) if has_tools else (THINK,)
        self._words = words
        self._markers = re.compile("|".join(map(re.escape, words)))
        self._buffer = ""
        self._pending: deque[str] = deque()
        self._display = DisplayContext()
        self._body: list[str] = []
        self._scanner = BodyScanner()
        self._opener = ""
        self._retries = 0
        self._num_shown = 0

    def feed(self, text: str) -> list[Segment]:
        """Segments that this text completes."""
        segments: list[Segment] = []
        self._pending.extend(_slices(text))
        while self._buffer or self._pending:
            before = len(self._buffer), self.channel, len(self._pending)
            if self.channel == "text":
                self._text(segments)
            elif self.channel == "reasoning":
                self._reasoning(segments)
            else:
                self._tool(segments)
            if (len(self._buffer), self.channel, len(self._pending)) == before:
                if not self._pending:
                    break
                self._buffer += self._pending.popleft()
        return segments

    def finish(self, is_cut: bool = False) -> list[Segment]:
        """Segments that the end of the generation completes. is_cut: the model had more to say."""
        segments: list[Segment] = []
        while not is_cut and self.channel == "tool" and self._scanner.provisional and self._retries < MAX_RETRIES:
            self._cut_at_provisional(segments)
            segments += self.feed("")
        held, self._buffer = self._buffer, ""
        if self.channel == "tool":
            body = "".join(self._body)
            segments.append(Segment("call", body, self._opener + body, is_closed=False))
        elif held and not self._is_lost_marker(held):
            segments.append(Segment(self.channel, held))
        return segments

    def _is_lost_marker(self, held: str) -> bool:
        """True for the beginning of a marker that the generation's end cut off: nothing that anyone should read."""
        if self.channel == "text" and self._display.is_shown:
            return False
        return len(held) >= (2 if self.channel == "reasoning" or self._display.is_line_start else 4)

    def _text(self, segments: list[Segment]) -> None:
        match = self._markers.search(self._buffer)
        end = match.start() if match else partial_marker(self._buffer, self._words)
        self._emit_text(segments, self._buffer[:end])
        if match is None:
            self._buffer = self._buffer[end:]
            return
        word = match.group()
        self._buffer = self._buffer[match.end() :]
        if self._display.is_shown or (word == CLOSE and self._num_shown):
            self._num_shown = max(0, self._num_shown + (1 if word == OPEN else -1 if word == CLOSE else 0))
            self._emit_text(segments, word)
        elif word == THINK:
            self.channel = "reasoning"
        elif word == OPEN:
            self._open_body(OPEN)

    def _emit_text(self, segments: list[Segment], text: str) -> None:
        if text:
            self._display.feed(text)
            segments.append(Segment("text", text))

    def _reasoning(self, segments: list[Segment]) -> None:
        at = self._buffer.find(THINK_END)
        end = at if at >= 0 else partial_marker(self._buffer, (THINK_END,))
        if end:
            segments.append(Segment("reasoning", self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if at >= 0:
            self._buffer = self._buffer[len(THINK_END) :]
            self._to_text()

    def _to_text(self) -> None:
        self.channel = "text"
        self._display.reset()
        self._num_shown = 0

    def _open_body(self, opener: str) -> None:
        self.channel, self._opener = "tool", opener
        self._body, self._scanner = [], BodyScanner()

    def _tool(self, segments: list[Segment]) -> None:
        text, self._buffer = self._buffer, ""
        self._body.append(text)
        self._scanner.feed(text)
        if self._scanner.end is None:
            return
        body_end, resume = self._scanner.end
        if self._scanner.provisional and not self._is_sound(body_end):
            self._cut_at_provisional(segments)
            return
        self._close_body(segments, body_end, resume)

    def _is_sound(self, end: int) -> bool:
        """True if the body up to `end` is a call by its structure, so that closers inside it were content."""
        if self._retries >= MAX_RETRIES:
            return True
        if self._scanner.kind == "json":
            return parse_json_calls("".join(self._body)[:end]) is not None
        return self._scanner.is_complete

    def _cut_at_provisional(self, segments: list[Segment]) -> None:
        """The body was no call: its first inner closer ends it, what follows is read anew."""
        self._retries += 1
        first = self._scanner.provisional[0]
        self._close_body(segments, first, first + len(CLOSE))

    def _close_body(self, segments: list[Segment], body_end: int, resume: int) -> None:
        body, scanner = "".join(self._body), self._scanner
        self._pending.extendleft(reversed(_slices(body[resume:])))
        opener, self._body = self._opener, []
        self._to_text()
        if scanner.is_prose:
            self._emit_text(segments, opener + body[:body_end])
        elif body[:body_end].strip() or resume > body_end:
            segments.append(Segment("call", body[:body_end], opener + body[:resume]))


def _slices(text: str) -> list[str]:
    return [text[start : start + SLICE] for start in range(0, len(text), SLICE)]
