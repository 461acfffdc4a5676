"""What the doctor finds on this machine: what `q27app doctor` prints, with the whole of a finding and its fix to copy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from textual.widget import Widget

from q27app.tui import panels
from q27app.tui.marks import Line
from q27app.tui.screens.dialogs import Detail
from q27app.tui.screens.room import Room
from q27app.tui.snapshot import clean
from q27app.tui.widgets.lines import Lines, ListPanel

if TYPE_CHECKING:
    from q27app.setup.doctor import Finding

ROLES = {"failure": "bad", "warning": "warn", "ok": "good"}
ID_WIDTH = 18


class Doctor(Room):
    """Findings, the worst first; the checks run in a thread."""

    KEYS = [("escape", "back"), ("enter", "detail"), ("y", "copy the fix"), ("r", "check again"), ("?", "help"), ("q", "quit")]
    BINDINGS = [("escape", "app.go('monitor')", "Back"), ("y", "copy", "Copy the fix"), ("r", "check", "Check again")]
    AUTO_FOCUS = "#findings"

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.is_checking = False

    def compose_body(self) -> Iterable[Widget]:
        yield Lines(self._summary, id="summary", classes="page short")
        yield ListPanel(lambda width: [(f"{'':<8} {'check':<{ID_WIDTH}} what was found", "dim")], finding_line,
                        lambda finding: (finding.id, finding.evidence), "checking ...", "this machine", id="findings",
                        classes="panel")
        yield Lines(self._whole, "finding", id="whole", classes="panel low")

    def on_mount(self) -> None:
        super().on_mount()
        self.action_check()

    def renew(self) -> None:
        super().renew()
        self.query_one("#findings", ListPanel).show(self.findings)
        for panel in self.query(Lines):
            panel.renew()

    def _summary(self, width: int, height: int) -> list[Line]:
        if self.is_checking:
            return [[("checking ...", "warn")]]
        numbers = {severity: sum(finding.severity == severity for finding in self.findings) for severity in ROLES}
        line: Line = []
        for severity, plural in (("failure", "failures"), ("warning", "warnings"), ("ok", "ok")):
            number = numbers[severity]
            line += [(f"{number} ", ROLES[severity] if number else "dim"), (f"{severity if number == 1 else plural}   ", "dim")]
        return [line]

    def _whole(self, width: int, height: int) -> list[Line]:
        finding = self.query_one("#findings", ListPanel).chosen
        if finding is None:
            return []
        lines: list[Line] = [[(text, "")] for text in panels.wrapped(clean(finding.evidence, 1000), width)]
        fix: Line = [("fix     ", "dim"), (clean(finding.fix), "accent")] if finding.fix else [("nothing to do", "dim")]
        return [*lines[: max(1, height - 1)], fix]

    def on_list_panel_moved(self) -> None:
        """Another finding is chosen."""
        self.query_one("#whole", Lines).renew()

    def on_list_panel_opened(self, event: ListPanel.Opened) -> None:
        """The whole finding."""
        finding = event.row
        self.app.push_screen(Detail(finding.id, {"severity": finding.severity, "found": finding.evidence, "fix": finding.fix}))

    def action_copy(self) -> None:
        """Copy the chosen finding's fix."""
        finding = self.query_one("#findings", ListPanel).chosen
        if finding is not None and finding.fix:
            self.app.copy(finding.fix, "the fix")

    def action_check(self) -> None:
        """Look again."""
        if not self.is_checking:
            self.is_checking = True
            self.run_worker(self._check(), name="doctor")

    async def _check(self) -> None:
        from q27app.setup.doctor import run_doctor

        try:
            found = await asyncio.to_thread(run_doctor)
            self.findings = sorted(found, key=lambda finding: list(ROLES).index(finding.severity))
        finally:
            self.is_checking = False
        self.renew_if_whole()


def finding_line(finding: Finding, width: int) -> Line:
    """One row: severity as a word, id, evidence."""
    word = "ok" if finding.severity == "ok" else finding.severity
    return [(f"{word:<8} ", ROLES.get(finding.severity, "")), (f"{clean(finding.id, ID_WIDTH):<{ID_WIDTH}} ", "bold"),
            (clean(finding.evidence, 400), "")]
