"""The model that is served and the files that could be: what `q27app list` lists on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget

from q27app.tui import figures
from q27app.tui.marks import Line
from q27app.tui.screens.dialogs import Detail
from q27app.tui.screens.room import Room
from q27app.tui.snapshot import clean
from q27app.tui.widgets.lines import Lines, ListPanel


class Models(Room):
    """Served and installed models."""

    KEYS = [("escape", "back"), ("l", "load"), ("u", "unload"), ("enter", "detail"), ("?", "help"), ("q", "quit")]
    BINDINGS = [("escape", "app.go('monitor')", "Back"), ("l", "app.load", "Load the model"),
                ("u", "app.unload", "Unload the model")]
    AUTO_FOCUS = "#files"

    def compose_body(self) -> Iterable[Widget]:
        yield Lines(self._served, "served", id="served", classes="panel")
        yield ListPanel(lambda width: [(f"{'name':<24} {'GB':>8}  path", "dim")], self._file, lambda entry: entry[0],
                        "no model", "on this machine", id="files", classes="panel")

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#files", ListPanel).show(_files())

    def renew(self) -> None:
        super().renew()
        self.query_one("#served", Lines).renew()

    def _served(self, width: int, height: int) -> list[Line]:
        snapshot = self.app.snapshot
        if snapshot is None:
            return [[("no data yet", "dim")]]
        memory = ", ".join(f"{part.name} {figures.gigabytes(part.size)}" for part in snapshot.parts)
        facts = {"state": snapshot.state, **({"memory, GB": memory} if memory else {}), **{clean(key, 16): clean(value) for key, value in snapshot.model.items()}}
        return [[(f"{key:<16} ", "dim"), (value, "")] for key, value in facts.items()]

    def _file(self, entry: tuple[str, str, int], width: int) -> Line:
        name, path, size = entry
        return [(f"{name[:24]:<24} ", "bold"), (f"{figures.gigabytes(size):>8}  ", ""), (path, "dim")]

    def on_list_panel_opened(self, event: ListPanel.Opened) -> None:
        """A file's facts and how to serve it."""
        name, path, size = event.row
        self.app.push_screen(Detail(name, {"path": path, "bytes": f"{size:,}", "serve it": f"q27app serve --model {name}"}))


def _files() -> list[tuple[str, str, int]]:
    """(name, path, bytes) of every model of this machine."""
    from q27app.paths import DEMO, demo_model, installed_models

    bundled = demo_model()
    files = [(DEMO, "bundled with q27app", bundled.stat().st_size)] if bundled.is_file() else []
    return files + [(path.stem, str(path), path.stat().st_size) for path in installed_models()]
