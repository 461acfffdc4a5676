"""Text of an answer, as it arrives -> typed deltas. One parser for streamed and whole answers.

splitter.py finds the channels and bare calls, tool_calls.py and tool_repair.py read calls, stops.py ends the text.
What this adds: only declared tools are called, values get their schema's types, nothing half-written is ever a call.

    a wrapped body                                       becomes
    one or more calls of offered tools, also with a      tool_start, tool_args, tool_end each
    known deviation (tool_repair.py)
    a call of another tool, or a second one where        text, as the model wrote it
    only one is allowed
    no call at all                                       text, as the model wrote it
    blank                                                nothing
    cut off by the end of the generation                 its whole calls; what was started is dropped and recorded,
                                                         prose that only mentioned the marker is text

    a bare call                                          the same; one that a limit cuts is dropped and recorded

Where the model itself ended and nothing but started calls came, they are shown as text, as the model wrote them: they never
run, but an answer is not silent.

Text that is only blanks, before or between calls and at the end, is not an answer and is dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from q27app.chat.conversation import offered_tools
from q27app.chat.splitter import Segment, Splitter, read_drifted_body
from q27app.chat.stops import StopMatcher
from q27app.chat.tool_body import CLOSE, OPEN
from q27app.chat.tool_calls import FoundCall, parse_body, typed_arguments
from q27app.chat.tool_repair import CLOSED, CUT, ENDED, required_of
from q27app.chat.types import Delta, Tool, ToolCall, ToolChoice

MAX_MISSED = 16
MAX_MISSED_CHARS = 2048
_CALL_STARTS = ("{", "<", "[")
_MARKS = ("{", "<", '", "')


class DeltaParser:
    """channel: where the answer starts ("reasoning" | "text" | "tool"). dialect: the template's, or "raw" for plain
    completions, where nothing but stop strings is looked for. make_id: names calls.

    num_calls; rescues: calls that were read by a known deviation, counted by its name (tool_repair.DRIFTS); missed:
    source texts of calls that could not be read (bounded). After `finish`: is_unfinished: the generation ended inside a
    call; stop_sequence: the stop string that ended the text.
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
        self.rescues: Counter[str] = Counter()
        self.is_unfinished = False
        self.dialect = dialect
        self._tools = {tool.name: tool for tool in offered_tools(tools, choice)}
        self._max_calls = None if choice.parallel else 1
        self._splitter = Splitter(channel, self._tools) if dialect != "raw" else None
        self._stops = StopMatcher(stop)
        self._has_stops = bool(stop)
        self._blank: str | None = "" if dialect != "raw" else None
        numbers = count(1)
        self._make_id = make_id or (lambda: f"call_{next(numbers)}")
        self._reads_calls = reads_calls
        self._is_cut = False
        self._has_text = False
        self._dropped: list[str] = []
        self._deltas: list[Delta] = []

    @property
    def channel(self) -> str:
        """Where the next text belongs, as far as can be told."""
        return self._splitter.channel if self._splitter else "text"

    def may_turn_at(self, text: str) -> bool:
        """False if `text` can neither change the channel nor end the answer, whenever it is fed: what turns is a tag."""
        return self._has_stops or ">" in text or (self._splitter is not None and not self._splitter.turns_at_tags)

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
        self._is_cut = is_cut
        deltas = self._take(self._splitter.finish(is_cut)) if self._splitter else []
        self._flush_text()
        if not (is_cut or self._has_text or self.num_calls or self._stops.found is not None):
            self._text("".join(self._dropped))
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
            elif segment.kind == "call":
                self._flush_text()
                if self._reads_calls:
                    self._body(segment)
            else:
                self._bare(segment)
        return self._drain()

    def _bare(self, segment: Segment) -> None:
        """What looked like a call outside a wrapper, or in one among other text."""
        if segment.kind == "refused":
            self._miss(segment.text)
            self._text(segment.text)
        elif segment.kind == "dropped":
            self._drop(segment.text)
        elif segment.call is not None:
            if self._reads_calls:
                self._call(segment.call)
            else:
                self._flush_text()

    def _drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _emit(self, kind: str, text: str) -> None:
        if not text:
            return
        self._has_text = self._has_text or kind == "text"
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
        calls = [item for item in items or () if isinstance(item, FoundCall)]
        if not any(self._is_offered(call) for call in calls):
            if not self._drifted(segment.text, segment.is_closed):
                self._no_call(segment, bool(calls))
            return
        for item in items or ():
            if isinstance(item, FoundCall):
                self._call(item)
            else:
                self._beside(item, segment.is_closed)

    def _beside(self, text: str, is_closed: bool) -> None:
        """What a wrapper holds beside its calls."""
        if self._drifted(text, is_closed):
            return
        if is_closed or not (_is_marker_rest(text) or text.lstrip().startswith(_CALL_STARTS)):
            self._text(text)
        elif not _is_marker_rest(text):
            self._drop(text)

    def _drifted(self, body: str, is_closed: bool) -> bool:
        """Reads a body, or a part of it, by the known deviations. False if no call is in it."""
        if not any(mark in body for mark in _MARKS):
            return False
        segments = read_drifted_body(body, self._tools, CLOSED if is_closed else CUT if self._is_cut else ENDED)
        if not any(segment.call is not None and self._is_offered(segment.call) for segment in segments):
            return False
        for segment in segments:
            if segment.kind != "text":
                self._bare(segment)
            elif segment.text.strip():
                self._beside(segment.text, is_closed)
        return True

    def _no_call(self, segment: Segment, is_whole: bool) -> None:
        """Nothing in the body can run. is_whole: it holds whole calls."""
        words = segment.text.replace(OPEN, "").replace(CLOSE, "")
        if not words.strip():
            if not segment.is_closed:
                self.is_unfinished = True
            return
        if not segment.is_closed and not is_whole and (_is_marker_rest(words) or words.lstrip().startswith(_CALL_STARTS)):
            self._drop(segment.raw, has_words=not _is_marker_rest(words))
        else:
            self._miss(segment.raw)
            self._text(segment.raw)

    def _is_offered(self, call: FoundCall) -> bool:
        tool = self._tools.get(call.name)
        if tool is None or (self._max_calls is not None and self.num_calls >= self._max_calls):
            return False
        return call.has_arguments or not required_of(tool)

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
        if found.drift:
            self.rescues[found.drift] += 1
        self._deltas += [
            Delta("tool_start", call=ToolCall(call_id, found.name, {})),
            Delta("tool_args", text=text, call=ToolCall(call_id, found.name, {})),
            Delta("tool_end", call=ToolCall(call_id, found.name, arguments)),
        ]

    def _drop(self, text: str, has_words: bool = True) -> None:
        """A call that was started and never became one; has_words: more than markers."""
        self.is_unfinished = True
        self._miss(text)
        if self._reads_calls and has_words:
            self._dropped.append(text)

    def _miss(self, text: str) -> None:
        if len(self.missed) < MAX_MISSED:
            self.missed.append(text[:MAX_MISSED_CHARS])


def _is_marker_rest(text: str) -> bool:
    """True for blanks and the beginning of a closer or opener."""
    word = text.strip()
    return not word or (len(word) >= 2 and (CLOSE.startswith(word) or OPEN.startswith(word)))
