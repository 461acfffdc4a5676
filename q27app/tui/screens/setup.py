"""The set-up dialogue as a form: steps, the question, its answers, and what of the card each answer would take.

The state machine is `setup.wizard`, the same that `q27app setup` talks through; nothing is written before the review is
answered. Reading the machine, the work that an answer asks for and the writing at the end happen in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from textual import events
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Input

from q27app.errors import Q27Error
from q27app.tui import figures, panels
from q27app.tui.marks import Line, width_of
from q27app.tui.screens.room import Room
from q27app.tui.snapshot import clean
from q27app.tui.widgets.lines import Lines, ListPanel

if TYPE_CHECKING:
    from q27app.setup.wizard import Option, Question, Wizard

STEPS_WIDTH = 13
BUDGET_PARTS = 5
BUDGET_HEIGHT = 5
MAX_LABEL = 44
Budget = tuple[tuple[str, int], ...]


class Setup(Room):
    """One question at a time. wizard: None while the machine is looked at."""

    KEYS = [("enter", "take this answer"), ("b", "back"), ("t", "type an answer"), ("escape", "leave"), ("?", "help"), ("q", "quit")]
    BINDINGS = [("escape", "leave", "Leave"), ("b", "back", "Step back"), ("t", "type", "Type an answer"), ("r", "begin", "Begin again")]
    AUTO_FOCUS = "#options"

    def __init__(self) -> None:
        super().__init__()
        self.wizard: Wizard | None = None
        self.question: Question | None = None
        self.trouble = ""
        self.told: list[str] = []
        """What the work says, and at the end what was done."""
        self.is_busy = self.is_written = False

    def compose_body(self) -> Iterable[Widget]:
        with Horizontal(id="setup"):
            yield Lines(self._steps, "steps", id="steps", classes="panel")
            with Vertical(id="asked"):
                yield Lines(self._question, "setup", id="question", classes="panel")
                yield ListPanel(lambda width: [("the proposed one first" if self.question else "", "dim")], self._option,
                                lambda option: option.value, "looking at this machine ...", "answers", id="options", classes="panel")
                yield Lines(self._budget, "memory of the card", id="budget", classes="panel")
        yield Input(placeholder="an answer; enter takes it, escape drops it", id="filter", compact=True)

    def on_mount(self) -> None:
        super().on_mount()
        self.begin_capture_print()
        self.action_begin()

    def on_print(self, event: events.Print) -> None:
        """What the work prints is how far it is."""
        lines = [text for text in event.text.replace("\r", "\n").split("\n") if text.strip()]
        if self.is_busy and lines:
            self.told = [*self.told, *map(clean, lines)][-3:]
            self.renew_if_whole()

    def renew(self) -> None:
        super().renew()
        question = self.question
        options = sorted(question.options, key=lambda option: option.value != question.default) if question else []
        why = "working ..." if self.is_busy else "that is all; escape goes back" if self.wizard else "looking at this machine ..."
        self.query_one("#options", ListPanel).show(options, why)
        self._fit(len(options))
        for panel in self.query(Lines):
            panel.renew()

    def _fit(self, num_options: int) -> None:
        """The question gets the lines that it needs, where the window is low before the memory, never before the answers."""
        panel = self.query_one("#question", Lines)
        needed = len(self._text(panel.content_size.width)) + 2 if panel.content_size.width else 0
        room = self.size.height - 2 - BUDGET_HEIGHT - min(num_options + 3, 9)
        self.query_one("#budget").display = needed <= room
        height = max(4, min(needed, room if needed <= room else room + BUDGET_HEIGHT))
        if panel.styles.height is None or panel.styles.height.value != height:
            panel.styles.height = height

    # what is shown

    def _steps(self, width: int, height: int) -> list[Line]:
        from q27app.setup.wizard import STEPS, applies

        wizard = self.wizard
        if wizard is None:
            return []
        steps = [step for step in STEPS if step in wizard.answers or applies(wizard, step)]
        at = steps.index(wizard.step) if wizard.step in steps else len(steps)
        first = max(0, min(at - height // 2, len(steps) - height))
        lines: list[Line] = []
        for index, step in enumerate(steps[first : first + height], first):
            mark = self.app.marks.cursor if index == at else " "
            answer = _said(wizard.answers.get(step, "")) if index < at else ""
            lines.append([(f"{mark} {step:<{STEPS_WIDTH - 2}}", "accent" if index == at else "bold" if index < at else "dim"),
                          (clean(answer, max(4, width - STEPS_WIDTH)), "")])
        return lines

    def _question(self, width: int, height: int) -> list[Line]:
        lines = self._text(width)
        if len(lines) > height > 0:
            lines = [*lines[: height - 1], [(f"... {len(lines) - height + 1} more lines in a higher window", "warn")]]
        return lines

    def _text(self, width: int) -> list[Line]:
        lines: list[Line] = []
        if self.question is not None:
            lines.append([(clean(self.question.title, width), "bold")])
            lines += [[(piece, "")] for text in self.question.text for piece in panels.wrapped(clean(text, 1000), width)]
            if self.question.takes:
                lines += [[(piece, "dim")] for piece in panels.wrapped(f"t types {self.question.takes}", width)]
            chosen = self.query_one("#options", ListPanel).chosen
            if chosen is not None and len(chosen.label) + len(chosen.reason) + 2 > width:
                lines += [[(piece, "accent")] for piece in panels.wrapped(f"{chosen.label}: {chosen.reason}", width)]
        elif self.wizard is not None and self.is_busy:
            lines.append([("This takes a while; escape does not stop it.", "warn")])
        lines += [[(piece, "bad")] for piece in panels.wrapped(self.trouble, width)]
        return lines + [[(piece, "")] for text in self.told for piece in panels.wrapped(text, width)]

    def _option(self, option: Option, width: int) -> Line:
        """One answer and its reason; one that cannot be chosen is dim."""
        labels = [len(each.label) for each in self.question.options] if self.question else []
        column = min(max(labels, default=0), MAX_LABEL)
        return [(f"{option.label:<{column}}", "" if option.is_possible else "dim"), (f"  {clean(option.reason, 400)}", "dim")]

    def _budget(self, width: int, height: int) -> list[Line]:
        rows = self._rows()
        return budget_lines(rows, width, self.app.marks) if rows else [[("nothing is planned yet", "dim")]]

    def _rows(self) -> Budget:
        """Of the answer under the cursor or in the field, else of the answers so far."""
        from q27app.setup.plan_text import budget_rows
        from q27app.setup.wizard import plan_for

        wizard, question = self.wizard, self.question
        if wizard is None or question is None:
            return ()
        field, chosen = self.query_one("#filter", Input), self.query_one("#options", ListPanel).chosen
        value = field.value.strip() if field.has_class("shown") else chosen.value if chosen is not None else ""
        try:
            changes = {question.step: value} if value and question.step in PLANNED else {}
            plan = plan_for(wizard, **changes)
        except (Q27Error, ValueError):
            return question.budget
        return budget_rows(plan) if plan is not None else question.budget

    # what is answered

    def on_list_panel_moved(self) -> None:
        """The bar shows what this answer takes."""
        self.renew_if_whole()

    def on_input_changed(self) -> None:
        """The bar follows what is typed."""
        self.query_one("#budget", Lines).renew()

    def on_list_panel_opened(self, event: ListPanel.Opened) -> None:
        """Take an answer."""
        self._take(event.row.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take what was typed."""
        value = event.value.strip()
        self._drop_field()
        if value:
            self._take(value)

    def _take(self, value: str) -> None:
        from q27app.setup.wizard import answered

        assert self.wizard is not None
        try:
            self._show(answered(self.wizard, value))
        except Q27Error as error:
            self.trouble = f"{error.message} {error.hint}".strip()
            self.renew_if_whole()

    def _show(self, wizard: Wizard) -> None:
        """The state from now on; carries out what it asks for."""
        from q27app.setup.wizard import question

        self.wizard, self.trouble, self.told = wizard, "", []
        self.question = None if wizard.work else question(wizard)
        if self.question is not None:
            self.query_one("#options", ListPanel).choose(self.question.default)
        if wizard.work:
            self._in_thread(self._work, wizard.work)
        elif wizard.step == "done":
            self._in_thread(self._write, "finish")
        elif wizard.step == "left":
            self.told = ["Nothing was written. r begins again."]
        self.renew_if_whole()

    def _in_thread(self, do: Callable[[], Any], name: str) -> None:
        self.is_busy = True
        self.run_worker(do(), name=name)

    async def _work(self) -> None:
        from q27app.setup.wizard import failed, worked

        wizard, carry_out = self.wizard, self.app.carry_out
        assert wizard is not None
        try:
            if carry_out is None:
                raise Q27Error("this can only be done on the machine itself: q27app setup.")
            result = await asyncio.to_thread(carry_out, wizard)
            after = worked(wizard, result)
        except (Q27Error, OSError) as error:
            after = failed(wizard, str(error))
        finally:
            self.is_busy = False
        self._show(after)

    async def _write(self) -> None:
        from q27app.setup.finish import finish
        from q27app.setup.wizard import outcome

        assert self.wizard is not None
        made, told = outcome(self.wizard), []
        try:
            await asyncio.to_thread(finish, made, told.append)
            self.is_written = True
            told += ["The daemon uses it from its next start on."] if not made.service else []
            told += ["Coding clients: q27app launch claude, q27app launch codex."] if made.shows_clients else []
        except (Q27Error, OSError) as error:
            self.trouble = str(error)
        finally:
            self.is_busy = False
        self.told = told
        self.renew_if_whole()

    # actions

    def action_begin(self) -> None:
        """Look at the machine and ask from the first step on."""
        if not self.is_busy:
            self.wizard = self.question = None
            self.is_written = False
            self._in_thread(self._read, "facts")

    async def _read(self) -> None:
        from q27app.setup.facts import read_facts
        from q27app.setup.wizard import begin

        try:
            facts = await asyncio.to_thread(read_facts)
        except (Q27Error, OSError) as error:
            self.trouble = str(error)
            self.renew_if_whole()
        else:
            self._show(begin(facts))
        finally:
            self.is_busy = False

    def action_back(self) -> None:
        """To the step before."""
        from q27app.setup.wizard import back

        if self.wizard is not None and self.question is not None:
            self._show(back(self.wizard))

    def action_type(self) -> None:
        """Type an answer that is not in the list."""
        if self.question is not None and self.question.takes:
            field = self.query_one("#filter", Input)
            field.add_class("shown")
            field.focus()

    def _drop_field(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self.query_one("#options").focus()

    def action_leave(self) -> None:
        """Drop what is typed, or go back to the monitor; answers stay until the window closes."""
        if self.query_one("#filter", Input).has_class("shown"):
            self._drop_field()
        else:
            self.app.go("monitor")


PLANNED = ("model", "tier", "kv", "context", "slots")
"""Steps whose answers change the plan."""


def _said(answer: str) -> str:
    """An answer as the list of steps shows it."""
    return f"{answer[:12]}..." if answer.startswith("GPU-") else answer.removeprefix("file:")


def budget_lines(rows: Budget, width: int, marks: Any) -> list[Line]:
    """A bar over the card's free memory, and what its parts are; the last row is what is left."""
    *parts, (_, left) = rows
    if len(parts) > BUDGET_PARTS:
        rest = parts[BUDGET_PARTS - 1 :]
        parts = [*parts[: BUDGET_PARTS - 1], (" and ".join(name for name, _ in rest), sum(size for _, size in rest))]
    total = sum(size for _, size in parts) + max(0, left)
    text = f" {figures.gigabytes(total - left)}/{figures.gigabytes(total)} GB"
    lines: list[Line] = [[*marks.bar([size / total for _, size in parts], max(4, width - len(text))), (text, "")], []]
    for index, (name, size) in enumerate([*parts, ("left", left)]):
        role = f"part{index}" if index < BUDGET_PARTS else "dim"
        spans: Line = [(marks.fills[index], role), (f"{name} {figures.gigabytes(size)}  ", "")]
        if width_of(lines[-1] + spans) > width + 2:
            lines.append([])
        lines[-1] += spans
    return lines
