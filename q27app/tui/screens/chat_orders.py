"""The chat's slash commands, each a method; what they share with the screen that has the widgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from q27app.errors import FileFormatError, Q27Error, UsageError, why
from q27app.tui import blocks, commands, exchange
from q27app.tui.history import Conversation, History, Message, end_of, siblings
from q27app.tui.screens.dialogs import Question
from q27app.tui.screens.room import Room
from q27app.tui.widgets.entry import Entry
from q27app.tui.widgets.lines import ListPanel
from q27app.tui.widgets.prompt_input import PromptInput
from q27app.tui.widgets.transcript import Transcript


class Orders(Room):
    """Owner of the open conversation and its settings. The chat screen adds widgets and streaming."""

    entries: list[Entry]
    answer: Any
    worker_of_answer: Any
    transcript: Transcript
    prompt: PromptInput

    def __init__(self) -> None:
        super().__init__()
        self.conversation: Conversation | None = None
        self.settings: dict[str, Any] = {}
        self.edited: Message | None = None
        self.hint = ""
        self._history: History | None = None
        self._search = ""

    def show_branch(self) -> None:
        raise NotImplementedError

    def begin_answer(self, question: int, text: str = "") -> None:
        raise NotImplementedError

    def note(self, text: str, kind: str = "note") -> None:
        raise NotImplementedError

    @property
    def history(self) -> History:
        """Opened when it is first needed. Raises Q27Error."""
        if self._history is None:
            path = self.app.history_path
            if path is None:
                from q27app.paths import ensured, state_dir

                path = ensured(state_dir()) / "history.db"
            self._history = History(path)
        return self._history

    def on_unmount(self) -> None:
        """The app ends."""
        if self._history is not None and self.answer is None:
            self._history.close()

    def fail(self, error: Q27Error) -> None:
        """Say what went wrong, in the transcript."""
        self.note(str(error), "error")

    def reload(self) -> None:
        """The open conversation as the history has it."""
        if self.conversation is not None:
            self.conversation = self.history.conversation(self.conversation.id)

    def open_conversation(self, number: int) -> None:
        """Make it the one in front."""
        self.conversation = self.history.conversation(number)
        self.settings = dict(self.conversation.settings)
        self.edited = None
        self.list_conversations()

    def list_conversations(self) -> None:
        """Show the list as it is now, if it is shown."""
        panel = self.query_one("#conversations", ListPanel)
        if panel.has_class("shown"):
            nothing = f"nothing with {self._search!r}" if self._search else "no conversation yet"
            panel.show(self.history.conversations(self._search), nothing)

    def obey(self, line: str) -> None:
        """A slash command."""
        try:
            command, rest = commands.parse(line)
            order: Callable[[str], None] = getattr(self, f"order_{command.name}")
            order(rest)
        except Q27Error as error:
            self.fail(error)

    def action_order(self, line: str) -> None:
        """A command from a key."""
        self.obey(f"/{line}")

    def _be_quiet(self) -> None:
        if self.answer is not None:
            raise UsageError("an answer streams.", "Escape stops it.")

    def _opened(self) -> Conversation:
        if self.conversation is None:
            raise UsageError("there is no conversation yet.", "Ask something, or choose one with f2.")
        return self.conversation

    def _last(self, role: str) -> Message:
        branch = self.history.branch(self._opened().id)
        found = next((message for message in reversed(branch) if message.role == role), None)
        if found is None:
            raise UsageError(f"there is no {'question' if role == 'user' else 'answer'} yet.")
        return found

    def order_new(self, rest: str) -> None:
        self._be_quiet()
        self.conversation, self.edited = None, None
        self.show_branch()
        self.prompt.focus()

    def order_history(self, rest: str) -> None:
        panel = self.query_one("#conversations", ListPanel)
        panel.toggle_class("shown")
        self._search = ""
        self.list_conversations()
        (panel if panel.has_class("shown") else self.prompt).focus()

    def order_search(self, rest: str) -> None:
        self._search = rest
        panel = self.query_one("#conversations", ListPanel)
        panel.add_class("shown")
        self.list_conversations()
        panel.focus()

    def order_find(self, rest: str) -> None:
        if not rest or not self.transcript.find(rest):
            raise UsageError(f"{rest[:60]!r} is not in this conversation.")

    def order_rename(self, rest: str) -> None:
        if not rest:
            raise UsageError("which title?", "/rename TITLE")
        self.history.change(self._opened().id, title=rest[:200])
        self.reload()
        self.list_conversations()
        self.renew()

    def order_delete(self, rest: str) -> None:
        self._be_quiet()
        conversation = self._opened()

        def answered(is_sure: bool | None) -> None:
            if is_sure:
                self.history.delete(conversation.id)
                self.order_new("")
                self.list_conversations()

        self.app.push_screen(Question(f"Delete the conversation {conversation.title!r} with all its branches?"), answered)

    def order_retry(self, rest: str) -> None:
        self._be_quiet()
        self.begin_answer(self._last("user").id)

    def order_edit(self, rest: str) -> None:
        self._be_quiet()
        self.edited = self._last("user")
        self.prompt.put(self.edited.text)
        self.prompt.focus()
        self.note("Sending makes a branch; /branch goes back to this one.")

    def order_branch(self, rest: str) -> None:
        self._be_quiet()
        conversation = self._opened()
        messages = self.history.messages(conversation.id)
        for message in reversed(self.history.branch(conversation.id)):
            others = siblings(messages, message)
            if len(others) > 1:
                place = next(index for index, other in enumerate(others) if other.id == message.id)
                other = others[(place + 1) % len(others)]
                self.history.change(conversation.id, leaf=end_of(messages, other.id))
                self.reload()
                self.show_branch()
                return
        raise UsageError("this conversation has one branch.", "/edit and /retry make others.")

    def order_stop(self, rest: str) -> None:
        if self.answer is None or self.worker_of_answer is None:
            raise UsageError("nothing streams.")
        self.worker_of_answer.cancel()

    def order_copy(self, rest: str) -> None:
        text, what = self.answer.text if self.answer is not None else self._last("assistant").text, "the answer"
        if rest.startswith("code"):
            found = blocks.code_blocks(text)
            if not found:
                raise UsageError("the last answer holds no code block.")
            text, what = found[-1], "the last code block"
        self.app.copy(text, what)

    def order_save(self, rest: str) -> None:
        if not rest:
            raise UsageError("into which file?", "/save PATH")
        self.app.save(Path(rest), self._last("assistant").text)

    def order_export(self, rest: str) -> None:
        conversation, path = self._opened(), Path(rest)
        if path.suffix == ".json":
            self.app.save(path, exchange.to_json(conversation, self.history.messages(conversation.id)))
        elif path.suffix == ".md":
            self.app.save(path, exchange.to_markdown(conversation, self.history.branch(conversation.id)))
        else:
            raise UsageError(f"{rest[:80]!r} ends in neither .json nor .md.", "/export PATH.json or /export PATH.md")

    def order_import(self, rest: str) -> None:
        self._be_quiet()
        path = Path(rest).expanduser()
        try:
            if path.stat().st_size > exchange.MAX_BYTES:
                raise FileFormatError(f"{path}: {path.stat().st_size:,} bytes, expected at most {exchange.MAX_BYTES:,}.")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileFormatError(f"{path}: cannot be read: {why(error)}.") from error
        self.open_conversation(exchange.load(self.history, text, path.name))
        self.show_branch()

    def order_system(self, rest: str) -> None:
        self._keep_settings({**self.settings, "system": rest} if rest else
                            {key: value for key, value in self.settings.items() if key != "system"})
        self.note(f"system prompt: {rest}" if rest else "no system prompt")

    def order_set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name:
            self._keep_settings(commands.with_setting(self.settings, name, value.strip()))
        lines = [f"{key:<18} {self.settings.get(key, 'as the daemon has it')}  ({rule.low:g} to {rule.high:g}, {rule.help})"
                 for key, rule in commands.SETTINGS.items()]
        self.note("\n".join(lines), "plain")

    def order_think(self, rest: str) -> None:
        if rest not in ("on", "off", "auto"):
            raise UsageError(f"think is {rest[:20]!r}, expected on, off or auto.")
        self._keep_settings({**self.settings, "think": rest})
        self.note(f"reasoning: {rest}")

    def order_model(self, rest: str) -> None:
        if rest:
            self._keep_settings({**self.settings, "model": rest[:200]})
        served = self.app.snapshot.model_name if self.app.snapshot else "unknown"
        self.note(f"served: {served}; sent: {self.settings.get('model') or 'no name, so what is served'}")

    def _keep_settings(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        if self.conversation is not None:
            self.history.change(self.conversation.id, settings=settings)
        self.renew()

    def order_monitor(self, rest: str) -> None:
        self.app.go("monitor")

    def order_help(self, rest: str) -> None:
        self.app.action_help()

    def order_quit(self, rest: str) -> None:
        self.app.action_leave()
