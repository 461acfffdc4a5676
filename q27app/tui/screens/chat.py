"""A conversation with the model: the list of conversations, the transcript, the prompt.

One answer streams at a time, in a worker of its own: pieces go into an `Answer`, a timer moves what is new into the transcript
(at most 1 / UPDATE_S times a second, and less often where drawing takes long) and into the history. Leaving the screen doesn't stop it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Static, TextArea
from textual.worker import Worker

from q27app.errors import Q27Error, Unreachable
from q27app.tui import commands, talk
from q27app.tui.history import WRITE_INTERVAL_S, Conversation, History, Message, siblings
from q27app.tui.marks import Line
from q27app.tui.screens.chat_orders import Orders
from q27app.tui.snapshot import clean
from q27app.tui.talk import Answer
from q27app.tui.widgets.entry import Entry, fold_words, stats_words
from q27app.tui.widgets.lines import Bar, ListPanel
from q27app.tui.widgets.prompt_input import PromptInput
from q27app.tui.widgets.transcript import Section, Transcript

UPDATE_S = 0.1


class Chat(Orders):
    """The second screen."""

    KEYS = [("enter", "send"), ("esc", "stop/back"), ("f1", "help"), ("f2", "list"), ("f5", "retry"), ("ctrl+j", "newline"),
            ("f4", "thoughts"), ("f6", "edit"), ("f7", "copy"), ("f8", "code"), ("ctrl+n", "new"), ("pgup/pgdn", "scroll"),
            ("ctrl+end", "newest"), ("/", "commands")]
    BINDINGS = [Binding(key, action, what, priority=True) for key, action, what in (
        ("escape", "leave", "Stop or back"), ("f2", "order('history')", "Conversations"),
        ("f4", "fold", "Fold or unfold the last thoughts"), ("f5", "order('retry')", "Retry"), ("f6", "order('edit')", "Edit"),
        ("f7", "order('copy')", "Copy the answer"), ("f8", "order('copy code')", "Copy its code"),
        ("ctrl+n", "order('new')", "New conversation"), ("pageup", "page(-1)", "Scroll up"),
        ("pagedown", "page(1)", "Scroll down"), ("ctrl+end", "newest", "Newest"),
    )]
    """Priority: the prompt has the focus and takes what it knows."""
    AUTO_FOCUS = "#prompt"

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.notes: list[Section] = []
        self.answer: Answer | None = None
        self.worker_of_answer: Worker[None] | None = None

    def compose_body(self) -> Iterable[Widget]:
        with Horizontal(id="chat"):
            yield ListPanel(lambda width: [("latest first", "dim")], self._conversation_line, lambda entry: entry.id,
                            "no conversation yet", "conversations", id="conversations", classes="panel")
            with Vertical(id="talk"):
                yield Transcript(self.app.marks.is_ascii, id="transcript")
                yield Static(f"new text {self.app.marks.down}  ctrl+end", id="more")
                yield Bar(self._state_line, id="chat-state")
                yield PromptInput(id="prompt")

    def on_mount(self) -> None:
        super().on_mount()
        self.note("Ask something. Enter sends, ctrl+j begins a line, / is a command (/help lists them).", "dim")

    def renew(self) -> None:
        super().renew()
        self.query_one("#chat-state", Bar).renew()

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    @property
    def prompt(self) -> PromptInput:
        return self.query_one("#prompt", PromptInput)

    def _conversation_line(self, entry: Conversation, width: int) -> Line:
        return [(clean(entry.title, max(4, width)), "bold" if self.conversation and entry.id == self.conversation.id else "")]

    def _state_line(self) -> list[Line]:
        left: Line = [(clean(self.conversation.title, 60) if self.conversation else "new conversation", "bold")]
        words = commands.words(self.settings)
        if words:
            left += [(f" {self.app.marks.dot} ", "dim"), (words, "accent")]
        if self.answer is None:
            return [left, []]
        seconds = time.monotonic() - self.answer.started_at
        word = "thinking" if self.answer.is_thinking else "answering" if self.answer.first_at else "waiting"
        progress = self._prefill_words() if word == "waiting" else ""
        return [left, [(f"{word} {seconds:.0f} s{progress} {self.app.marks.dot} esc stops", "warn")]]

    def _prefill_words(self) -> str:
        """How far the daemon is with the prompt, as far as it can be told from the outside: if one request runs."""
        rows = self.app.snapshot.rows if self.app.snapshot else []
        return f", {rows[0].state}" if len(rows) == 1 and rows[0].state != "decode" else ""

    # showing

    def show(self) -> None:
        """The entries and notes as they are now."""
        sections = [section for entry in self.entries for section in entry.sections()]
        self.transcript.show([*sections, *self.notes])

    def note(self, text: str, kind: str = "note") -> None:
        """A line of the program's own, below the conversation, until the next question."""
        self.notes.append(Section(kind, text, gap=1))
        self.call_after_refresh(self.show)

    def show_branch(self) -> None:
        """Read the branch in front again."""
        self.notes = []
        self.entries = []
        if self.conversation is not None:
            messages = self.history.messages(self.conversation.id)
            for message in self.history.branch(self.conversation.id):
                self.entries.append(self._entry_of(message, messages))
        self.transcript.follow()
        self.call_after_refresh(self.show)
        self.renew()

    def _entry_of(self, message: Message, messages: list[Message]) -> Entry:
        entry = Entry(message.id, message.role, self._name_of(message, messages), self.app.marks)
        entry.add_reasoning(message.reasoning)
        entry.add_text(message.text)
        entry.set_calls(message.calls)
        stats = message.stats
        words, kind = stats_words(message, self.app.marks) if message.role == "assistant" else ("", "dim")
        entry.set_words(fold_words(stats.get("reasoning_s"), stats.get("num_reasoning"), False), words, kind)
        entry.finish()
        return entry

    def _name_of(self, message: Message, messages: list[Message]) -> str:
        name = "you" if message.role == "user" else clean(message.stats.get("model"), 60) or "model"
        others = siblings(messages, message)
        if len(others) > 1:
            place = next(index for index, other in enumerate(others) if other.id == message.id)
            name += f"  branch {place + 1} of {len(others)}"
        return name

    # asking

    def on_prompt_input_submitted(self, event: PromptInput.Submitted) -> None:
        """A question, or a command."""
        text = event.text
        if text.startswith("/") and not text.startswith("//"):
            self.prompt.put("")
            self.obey(text)
            return
        if self.answer is not None:
            self.notify("An answer streams; escape stops it.", severity="warning")
            return
        self.prompt.put("")
        self.ask(text.removeprefix("/") if text.startswith("//") else text)

    def ask(self, text: str) -> None:
        """Add a question after the leaf, or where `/edit` has said, and have it answered."""
        try:
            if self.conversation is None:
                self.open_conversation(self.history.create(talk.title_of(text), self.settings))
            assert self.conversation is not None
            parent = self.edited.parent if self.edited else self.conversation.leaf
            self.edited = None
            question = self.history.add(self.conversation.id, parent, "user", text)
            self.begin_answer(question, text)
        except Q27Error as error:
            self.fail(error)

    def begin_answer(self, question: int, text: str = "") -> None:
        """Stream an answer to a message. text: goes back into the prompt if nothing comes."""
        assert self.conversation is not None
        served = self.app.snapshot.model_name if self.app.snapshot else ""
        stats = {"model": self.settings.get("model") or served}
        number = self.history.add(self.conversation.id, question, "assistant", "", stats=stats, state="streaming")
        self.reload()
        branch = self.history.branch(self.conversation.id)
        self.show_branch()
        self.answer = Answer()
        self.answer.stats = stats
        messages = talk.request_messages(branch[:-1], str(self.settings.get("system") or ""))
        self.worker_of_answer = self.run_worker(self._stream(number, messages, question, text), name="answer")

    async def _stream(self, number: int, messages: list[dict[str, Any]], question: int, text: str) -> None:
        answer, entry, history = self.answer, self.entries[-1], self.history
        assert answer is not None and self.conversation is not None
        model, conversation = dict(answer.stats), self.conversation.id
        ticker = asyncio.create_task(self._tick(answer, entry, number, history))
        try:
            await self._receive(answer, messages)
        except Q27Error as error:
            answer.close("failed", clean(error, 400))
        except asyncio.CancelledError:
            answer.close("stopped")
        finally:
            ticker.cancel()
            answer.close("failed", "the stream ended without saying why.")
            answer.stats = {**answer.stats, **{key: value for key, value in model.items() if value}}
            self.answer = None
            entry_now = self._entry_at(number)
            self._update(answer, entry_now or entry)
            (entry_now or entry).finish()
            self._keep(answer, number, history, conversation, question, text)
            self.show_if_here()

    async def _receive(self, answer: Answer, messages: list[dict[str, Any]]) -> None:
        if self.app.client is None:
            raise Unreachable("no daemon is connected.", "Wait for the connection, then f5 asks again.")
        fields = commands.request_fields(self.settings)
        async with aclosing(self.app.client.chat(messages, **fields)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                answer.take(piece)

    async def _tick(self, answer: Answer, entry: Entry, number: int, history: History) -> None:
        """Show what is new, and write it down."""
        written_at, cost = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(max(UPDATE_S, 4 * cost))
            started = time.process_time()
            self._update(answer, self._entry_at(number) or entry)
            self.show_if_here()
            cost = time.process_time() - started
            if time.monotonic() - written_at >= WRITE_INTERVAL_S:
                try:
                    calls = [dict(call) for call in answer.calls]
                    await asyncio.to_thread(history.write, number, answer.text, answer.reasoning, calls, answer.stats, "streaming")
                except Q27Error as error:
                    self.notify(str(error), severity="error", markup=False)
                written_at = time.monotonic()

    def _entry_at(self, number: int) -> Entry | None:
        return next((entry for entry in self.entries if entry.message_id == number), None)

    def _update(self, answer: Answer, entry: Entry) -> None:
        reasoning, text = answer.news()
        entry.add_reasoning(reasoning)
        entry.add_text(text)
        entry.set_calls(answer.calls)
        fold = fold_words(answer.reasoning_s, answer.stats.get("num_reasoning"), answer.is_thinking)
        message = Message(entry.message_id, None, "assistant", "", stats=answer.stats, state=answer.state)
        words, kind = stats_words(message, self.app.marks) if answer.state != "streaming" else ("", "dim")
        entry.set_words(fold, words, kind)

    def show_if_here(self) -> None:
        """Draw, unless the screen is gone."""
        if self.is_mounted and self.is_attached and self.query("#transcript"):
            self.show()
            self.renew_if_whole()

    def _keep(self, answer: Answer, number: int, history: History, conversation: int, question: int, text: str) -> None:
        """Write the end of an answer; one that failed before it began gives its question back."""
        try:
            if answer.state == "failed" and answer.is_empty and text:
                error = answer.stats.get("error", "")
                parent = next((message.parent for message in history.messages(conversation) if message.id == question), None)
                history.take_back(conversation, [number, question], parent)
                if self.conversation and self.conversation.id == conversation:
                    self.reload()
                    self.show_branch()
                    if not self.prompt.text:
                        self.prompt.put(text)
                self.note(f"No answer: {error}", "error")
                return
            history.write(number, answer.text, answer.reasoning, answer.calls, answer.stats, answer.state)
        except Q27Error as error:
            self.fail(error)

    # keys

    def action_leave(self) -> None:
        """Stop the answer; or close the list; or go back to the monitor."""
        if self.answer is not None and self.worker_of_answer is not None:
            self.worker_of_answer.cancel()
        elif self.query_one("#conversations").has_class("shown"):
            self.action_order("history")
        else:
            self.app.go("monitor")

    def action_page(self, direction: int) -> None:
        """Scroll the transcript from the prompt."""
        transcript = self.transcript
        (transcript.scroll_page_up if direction < 0 else transcript.scroll_page_down)(animate=False)

    def action_newest(self) -> None:
        """To the end."""
        self.transcript.follow()

    def action_fold(self) -> None:
        """The last answer that has thoughts."""
        for entry in reversed(self.entries):
            if entry.role == "assistant":
                entry.toggle()
                self.show()
                return

    def on_transcript_clicked(self, event: Transcript.Clicked) -> None:
        """Fold or unfold."""
        if isinstance(event.owner, Entry):
            event.owner.toggle()
            self.show()

    def on_transcript_followed(self, event: Transcript.Followed) -> None:
        """The chip tells that there is more below."""
        self.query_one("#more").set_class(not event.is_following, "shown")

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Completes what a slash begins, as a hint under the transcript."""
        text = self.prompt.text
        hint = ""
        if text.startswith("/") and "\n" not in text and " " not in text:
            near = [f"/{command.usage}" for command in commands.COMMANDS if command.name.startswith(text[1:])]
            hint = "   ".join(near[:8])
        if hint != self.hint:
            self.hint = hint
            self.prompt.border_subtitle = hint or None

    def on_list_panel_opened(self, event: ListPanel.Opened) -> None:
        """Open a conversation."""
        if self.answer is not None:
            self.notify("An answer streams; escape stops it.", severity="warning")
            return
        self.open_conversation(event.row.id)
        self.show_branch()
        self.prompt.focus()
