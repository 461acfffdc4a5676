"""Text of an answer, as it arrives -> typed deltas. One parser for streamed and whole answers.

splitter.py finds the channels, tool_calls.py reads calls, stops.py ends the text. What this adds: only declared tools
are called, values get their schema's types, and nothing half-written is ever a call.

    a wrapped body                                       becomes
    one or more well-formed calls of offered tools       tool_start, tool_args, tool_end each
    a call of another tool, or a second one where        text, as the model wrote it
    only one is allowed
    no call at all                                       text, as the model wrote it
    blank                                                nothing
    cut off by the end of the generation                 its whole calls; what was started is dropped and recorded,
                                                         prose that only mentioned the marker is text

Text that is only blanks, before or between calls and at the end, is not an answer and is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from q27app.chat.conversation import offered_tools
from q27app.chat.splitter import Segment, Splitter
from q27app.chat.stops import StopMatcher
from q27app.chat.tool_body import CLOSE, OPEN
from q27app.chat.tool_calls import FoundCall, parse_body, typed_arguments
from q27app.chat.types import Delta, Tool, ToolCall, ToolChoice

MAX_MISSED = 16
MAX_MISSED_CHARS = 2048


class DeltaParser:
    """channel: where the answer starts ("reasoning" | "text" | "tool"). dialect: the template's, or "raw" for plain
    completions, where nothing but stop strings is looked for. make_id: names calls.

    After `finish`: num_calls; missed: source texts of calls that could not be read (bounded); is_unfinished: the
    generation ended inside a wrapper; stop_sequence: the stop string that ended the text.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        channel: str = "text",
        dialect: str = "xml",
        stop: Sequence[str] = (),
        make_id: Callable[[], str] | None = None,
        reads_calls: bool = True,
    ) -> None:
        choice = tool_choice or ToolChoice()
        self.num_calls = 0
        self.missed: list[str] = []
        self.is_unfinished = False
        self.dialect = dialect
        self._tools = {tool.name: tool for tool in offered_tools(tools, choice)}
        self._max_calls = None if choice.parallel else 1
        self._splitter = Splitter(channel, bool(self._tools)) if dialect != "raw" else None
        self._stops = StopMatcher(stop)
        self._blank: str | None = "" if dialect != "raw" else None
        numbers = count(1)
        self._make_id = make_id or (lambda: f"call_{next(numbers)}")
        self._reads_calls = reads_calls
        self._deltas: list[Delta] = []

    @property
    def channel(self) -> str:
        """Where the next text belongs, as far as can be told."""
        return self._splitter.channel if self._splitter else "text"

    @property
    def stop_sequence(self) -> str | None:
        return self._stops.found

    def feed(self, text: str) -> list[Delta]:
        """Deltas that this text completes. After a stop string: none."""
        if self._stops.found is not None:
            return []
        segments = self._splitter.feed(text) if self._splitter else [Segment("text", text)]
        return self._take(segments)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """Deltas that the end of the generation completes. is_cut: a limit ended it; a call that was being written may
        hold closers as content, so nothing of it is taken for the end of the call and shown."""
        if self._stops.found is not None:
            return []
        deltas = self._take(self._splitter.finish(is_cut)) if self._splitter else []
        self._flush_text()
        return deltas + self._drain()

    def finish_reason(self, engine_reason: str) -> str:
        """"stop" | "length" | "tool_calls" | "stop_sequence", given why the engine ended."""
        if self._stops.found is not None:
            return "stop_sequence"
        if self.num_calls and not (self.is_unfinished and engine_reason == "length"):
            return "tool_calls"
        return "length" if engine_reason == "length" else "stop"

    # ------------------------------------------------------------------ segments

    def _take(self, segments: list[Segment]) -> list[Delta]:
        for segment in segments:
            if self._stops.found is not None:
                break
            if segment.kind == "text":
                self._text(segment.text)
            elif segment.kind == "reasoning":
                self._flush_text()
                self._emit("reasoning", segment.text)
            else:
                self._flush_text()
                if self._reads_calls:
                    self._body(segment)
        return self._drain()

    def _drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _emit(self, kind: str, text: str) -> None:
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.kind == kind:
            self._deltas[-1] = replace(last, text=last.text + text)
        else:
            self._deltas.append(Delta(kind, text=text))

    def _text(self, text: str) -> None:
        """Blanks at the head of a stretch wait for something to follow; they are not searched for stop strings."""
        if self._blank is not None:
            body = text.lstrip()
            self._blank += text[: len(text) - len(body)]
            if not body:
                return
            self._emit("text", self._blank)
            self._blank, text = None, body
        self._emit("text", self._stops.feed(text))

    def _flush_text(self) -> None:
        """A stretch of text ends: what a stop string held back is text, blanks without text are nothing."""
        self._emit("text", self._stops.flush())
        if self._splitter:
            self._blank = ""

    # ------------------------------------------------------------------ calls

    def _body(self, segment: Segment) -> None:
        items = parse_body(segment.text, segment.is_closed)
        if items is None:
            self._no_call(segment)
            return
        calls = [item for item in items if isinstance(item, FoundCall)]
        if segment.is_closed and not any(self._is_offered(call) for call in calls):
            self._miss(segment.raw)
            self._text(segment.raw)
            return
        for item in items:
            if isinstance(item, FoundCall):
                self._call(item)
            elif segment.is_closed:
                self._text(item)
            elif not _is_marker_rest(item):
                self.is_unfinished = True
                self._miss(item)

    def _no_call(self, segment: Segment) -> None:
        """Nothing in the body can run."""
        words = segment.text.replace(OPEN, "").replace(CLOSE, "")
        if not words.strip():
            if not segment.is_closed:
                self.is_unfinished = True
            return
        self._miss(segment.raw)
        if segment.is_closed:
            self._text(segment.raw)
        elif _is_marker_rest(words) or words.lstrip().startswith(("{", "<", "[")):
            self.is_unfinished = True
        else:
            self._text(segment.raw)

    def _is_offered(self, call: FoundCall) -> bool:
        tool = self._tools.get(call.name)
        if tool is None or (self._max_calls is not None and self.num_calls >= self._max_calls):
            return False
        required = tool.parameters.get("required") if isinstance(tool.parameters, dict) else None
        return call.has_arguments or not required

    def _call(self, found: FoundCall) -> None:
        if not self._is_offered(found):
            self._miss(found.raw)
            self._text(found.raw)
            return
        self._flush_text()
        arguments = found.arguments if found.is_typed else typed_arguments(found.arguments, self._tools[found.name])
        text = json.dumps(arguments, ensure_ascii=False)
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if clean != text:
            text, arguments = clean, json.loads(clean)
        call_id = self._make_id()
        self.num_calls += 1
        self._deltas += [
            Delta("tool_start", call=ToolCall(call_id, found.name, {})),
            Delta("tool_args", text=text, call=ToolCall(call_id, found.name, {})),
            Delta("tool_end", call=ToolCall(call_id, found.name, arguments)),
        ]

    def _miss(self, text: str) -> None:
        if len(self.missed) < MAX_MISSED:
            self.missed.append(text[:MAX_MISSED_CHARS])


def _is_marker_rest(text: str) -> bool:
    """True for blanks and the beginning of a closer or opener."""
    word = text.strip()
    return not word or (len(word) >= 2 and (CLOSE.startswith(word) or OPEN.startswith(word)))
