"""Cuts an answer's text into channels as it arrives: reasoning, text, and tool calls, wrapped or bare.

    channel     looks for                              and then
    text        <think>, <tool_call>, </tool_call>     opens reasoning, opens a call, drops a closer that closes nothing
                the beginning of a bare call           holds it until it is one, or none (bare_calls.py)
    reasoning   </think>                               back to text
    tool        the end of the body (tool_body.py)     back to text

In text a marker that is only shown (display.py) is text. The end of the buffer is held back while it may be the
beginning of a marker. The segments, joined by kind, do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from q27app.chat.bare_calls import INFERRED, NO_HEAD, BareUnit, Outcome
from q27app.chat.display import DisplayContext
from q27app.chat.tool_body import CLOSE, OPEN, BodyScanner, partial_marker
from q27app.chat.tool_calls import FoundCall, parse_json_calls
from q27app.chat.tool_repair import CUT, ENDED
from q27app.chat.types import Tool

THINK, THINK_END = "<think>", "</think>"
SLICE = 1024
"""Characters that are looked at in one go: cutting pieces off the buffer stays cheap."""
MAX_RETRIES = 8
"""How often a malformed body is cut again at a closer inside it: keeps the time linear."""


MAX_NAMED_TOOLS = 512
MAX_NO_HEAD = 8
"""Tools whose names are looked for without a head, and how often one may turn out to be none."""
BARE_WORDS = ("<function", "<parameter", "<tool_name>", "<tool_calls>", "<tool>", "<name>", "<name=")
_JSON_START = r'\{(?=\s{0,64}(?:\Z|"(?:\Z|[naft])))'
_RESIDUE = re.compile(r"\s*</(?:parameter|function|tool_calls?|tool|tool_name|name)>")
_RESIDUE_NAMES = ("parameter", "function", "tool_call", "tool_calls", "tool", "tool_name", "name")
_RESIDUE_WORDS = tuple(f"</{name}>" for name in _RESIDUE_NAMES)
MAX_RESIDUE_BLANKS = 256
_WORD_START = re.compile(r"\b\w")
_NAME = re.compile(r"\w[^\s\"]{0,255}")


@dataclass(frozen=True)
class Segment:
    """kind: "text" | "reasoning" | "call" (a wrapper: its body; raw: with its markers) | "found" (a bare call, read) |
    "refused" (text that looked like a bare call) | "dropped" (the same, cut by a limit).

    is_closed: False if the generation ended inside the wrapper.
    """

    kind: str
    text: str
    raw: str = ""
    is_closed: bool = True
    call: FoundCall | None = None


class Splitter:
    """channel: where the text starts. tools: what is offered; none: tool markers are plain text. is_body: the text is
    the body of a wrapper, with more of its markers in it."""

    def __init__(self, channel: str, tools: Mapping[str, Tool], is_body: bool = False) -> None:
        self.channel = channel
        self._tools = tools
        self._is_body = is_body
        words: tuple[str, ...] = (OPEN, CLOSE) if is_body else (THINK, OPEN, CLOSE) if tools else (THINK,)
        self._words = words + BARE_WORDS if tools else words
        patterns = [re.escape(word) for word in self._words]
        named = sorted(filter(_NAME.fullmatch, tools), key=len, reverse=True)[:MAX_NAMED_TOOLS]
        self._starts = frozenset(f'{name}", "'[:end] for name in named for end in range(1, len(name) + 4))
        if tools:
            patterns += [_JSON_START, *(re.escape(f'{name}", "') for name in named)]
        self._markers = re.compile("|".join(patterns))
        self._buffer = ""
        self._pending: deque[str] = deque()
        self._display = DisplayContext()
        self._unit: BareUnit | None = None
        self._before = ""
        self._has_call = self._is_ambiguous = self._infers_not = self._takes_residue = False
        self._num_no_head = 0
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
            before = self._progress()
            if self.channel == "text":
                self._text(segments)
            elif self.channel == "reasoning":
                self._reasoning(segments)
            else:
                self._tool(segments)
            if self._progress() == before:
                if not self._pending:
                    break
                self._buffer += self._pending.popleft()
        return segments

    def _progress(self) -> tuple:
        return len(self._buffer), self.channel, len(self._pending), self._unit is None, self._takes_residue

    @property
    def turns_at_tags(self) -> bool:
        """True if the channel can change only where a tag ends: no call is being read, none is held back."""
        return self._unit is None and self.channel != "tool"

    def finish(self, is_cut: bool = False, how: str = "") -> list[Segment]:
        """Segments that the end of the generation completes. is_cut: the model had more to say. how: as what the end
        of a bare call counts, if not as that."""
        segments: list[Segment] = []
        how = how or (CUT if is_cut else ENDED)
        while self._unit is not None or (
            not is_cut and self.channel == "tool" and self._scanner.provisional and self._retries < MAX_RETRIES
        ):
            if self._unit is not None:
                self._settle(segments, self._unit.finish(how), how)
            else:
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
        if self.channel == "text" and (self._display.is_shown or not held.startswith("<")):
            return False
        words = (THINK_END,) if self.channel == "reasoning" else (*self._words, *_RESIDUE_WORDS)
        if not any(word.startswith(held) for word in words):
            return False
        return len(held) >= (2 if self.channel == "reasoning" or self._display.is_line_start else 4)

    def _text(self, segments: list[Segment]) -> None:
        if self._unit is not None:
            text, self._buffer = self._buffer, ""
            outcome = self._unit.feed(text) if text else None
            if outcome is not None:
                self._settle(segments, outcome)
            return
        if self._takes_residue and not self._drop_residue():
            return
        match = self._markers.search(self._buffer)
        end = match.start() if match else self._hold()
        self._emit_text(segments, self._buffer[:end])
        if match is None:
            self._buffer = self._buffer[end:]
            return
        word = match.group()
        if word in (THINK, OPEN, CLOSE):
            self._buffer = self._buffer[match.end() :]
            self._marker(segments, word)
        elif self._may_begin(word):
            self._buffer = self._buffer[end:]
            self._unit = BareUnit(
                self._tools, self._display.is_line_start, self._is_body, "" if word[0] in "{<" else word[: -len('", "')]
            )
        else:
            self._buffer = self._buffer[end + 1 :]
            self._emit_text(segments, word[0])

    def _hold(self) -> int:
        """Where the buffer's end may begin a marker."""
        end = partial_marker(self._buffer, self._words)
        if not self._starts or self._has_call:
            return end
        for rest in ('", ', '",', '"', ""):
            if rest and not self._buffer.endswith(rest):
                continue
            body = self._buffer[: len(self._buffer) - len(rest)]
            start = max((at for at in _word_starts(body) if body[at:] + rest in self._starts), default=-1)
            if start >= 0:
                return min(end, start)
        return end

    def _marker(self, segments: list[Segment], word: str) -> None:
        if self._is_body:
            return
        if self._display.is_shown or (word == CLOSE and self._num_shown):
            self._num_shown = max(0, self._num_shown + (1 if word == OPEN else -1 if word == CLOSE else 0))
            self._emit_text(segments, word)
        elif word == THINK:
            self.channel = "reasoning"
        elif word == OPEN:
            self._open_body(OPEN)

    def _may_begin(self, word: str) -> bool:
        """True if a bare call may begin right here."""
        if word[0] not in "{<":
            is_word = self._before[-1:].isalnum() or self._before[-1:] in ("_", '"', "'", "\\")
            if self._has_call or self._is_ambiguous or self._num_no_head >= MAX_NO_HEAD or is_word:
                return False
        return not self._display.is_inert

    def _settle(self, segments: list[Segment], outcome: Outcome, how: str = "") -> None:
        """What was held is a call, or text; what follows it is looked at anew."""
        assert self._unit is not None
        self._pending.extendleft(reversed(_slices(self._buffer)))
        self._pending.extendleft(reversed(_slices(outcome.rest)))
        is_headless, self._unit, self._buffer = bool(self._unit.tool), None, ""
        self._infers_not = self._infers_not or outcome.names_unknown
        call = outcome.call
        if call is not None and not (self._infers_not and call.drift in INFERRED):
            segments.append(Segment("found", outcome.source, outcome.source, call=call))
            self._has_call = self._has_call or call.drift != NO_HEAD
            self._display.reset()
            self._num_shown, self._takes_residue = 0, True
            return
        if is_headless:
            self._num_no_head += 1
            self._is_ambiguous = True
        if outcome.is_started and (how == CUT or outcome.is_half):
            segments.append(Segment("dropped", outcome.source))
            return
        self._emit_text(segments, outcome.source)
        if outcome.is_started:
            segments[-1] = Segment("refused", outcome.source)

    def _drop_residue(self) -> bool:
        """Closers right after a bare call belong to it. False while that cannot be told."""
        while True:
            body = self._buffer.lstrip()
            num_blanks = len(self._buffer) - len(body)
            match = _RESIDUE.match(self._buffer)
            if not match or num_blanks > MAX_RESIDUE_BLANKS:
                break
            self._buffer = self._buffer[match.end() :]
        if num_blanks <= MAX_RESIDUE_BLANKS and (not body or any(word.startswith(body) for word in _RESIDUE_WORDS)):
            return False
        self._takes_residue = False
        return True

    def _emit_text(self, segments: list[Segment], text: str) -> None:
        if text:
            self._display.feed(text)
            self._before = text[-1]
            self._is_ambiguous = self._is_ambiguous and "\n" not in text
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
        self._num_shown, self._before = 0, ""
        self._infers_not = self._takes_residue = False

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
        self._has_call = self._has_call or not scanner.is_prose
        if scanner.is_prose:
            self._emit_text(segments, opener + body[:body_end])
        elif body[:body_end].strip() or resume > body_end:
            segments.append(Segment("call", body[:body_end], opener + body[:resume]))


def _slices(text: str) -> list[str]:
    return [text[start : start + SLICE] for start in range(0, len(text), SLICE)]


def _word_starts(text: str) -> list[int]:
    """Where a tool's name that goes on to the end of `text` may begin."""
    start = max(text.rfind(" "), text.rfind("\n"), text.rfind("\t"), text.rfind('"'), len(text) - 300) + 1
    return [start + match.start() for match in _WORD_START.finditer(text[start:])]


def read_drifted_body(body: str, tools: Mapping[str, Tool], how: str) -> list[Segment]:
    """A wrapper's body that is not well-formed, as segments. how: as what its end counts."""
    splitter = Splitter("text", tools, is_body=True)
    return splitter.feed(body.strip()) + splitter.finish(how == CUT, how)
