"""The prompt: many lines, Enter sends, ctrl+j begins a line. A paste never sends."""

from __future__ import annotations

from textual import events
from textual.message import Message
from textual.widgets import TextArea


class PromptInput(TextArea):
    """Posts Submitted; keeps what was sent, for the up key in an empty prompt."""

    class Submitted(Message):
        """Enter."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, **options: object) -> None:
        super().__init__(show_line_numbers=False, soft_wrap=True, compact=True, **options)  # type: ignore[arg-type]
        self._sent: list[str] = []

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            if self.text.strip():
                self._sent = [*self._sent[-99:], self.text]
                self.post_message(self.Submitted(self.text))
        elif event.key in ("ctrl+j", "shift+enter"):
            event.prevent_default()
            event.stop()
            self.insert("\n")
        elif event.key == "up" and not self.text and self._sent:
            event.prevent_default()
            event.stop()
            self.put(self._sent[-1])
        else:
            await super()._on_key(event)

    def put(self, text: str) -> None:
        """Replace what is typed; the cursor goes to the end."""
        self.text = text
        self.move_cursor(self.document.end)
