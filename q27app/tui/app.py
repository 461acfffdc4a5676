"""The terminal application: screens over one poller. It attaches to a daemon, or awaits a starter that gives it one.

Owner of the client, the poller and the history. Screens read `snapshot`, `recent`, `log` and `trends` here and are told to
`renew` when something is new; a frozen app shows what was known when it froze.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, SystemCommand
from textual.screen import Screen

from q27app.errors import Q27Error, Unreachable
from q27app.tui.marks import Marks
from q27app.tui.poller import INTERVAL_S, Poller, Trends
from q27app.tui.screens.dialogs import Help, Question
from q27app.tui.screens.monitor import Monitor
from q27app.tui.screens.room import Room
from q27app.tui.snapshot import Snapshot, clean

if TYPE_CHECKING:
    from q27app.client import Client

Starter = Callable[[], AbstractAsyncContextManager[str]]
"""Makes a daemon on the running loop and gives its address; leaving it stops the daemon."""
RENEW_S = 1.0
"""How often ages and the like are looked at when no answer comes."""


@dataclass(frozen=True)
class _Frozen:
    snapshot: Snapshot | None
    recent: list[dict[str, Any]]
    log: list[dict[str, Any]]


class Q27App(App[None]):
    """url, key: of the daemon. starter: used if nothing answers there; None: keep trying. first: "monitor" or "chat".
    carry_out: does the work that a state of the set-up asks for, in a thread; None: such work is refused."""

    CSS_PATH = "app.tcss"
    TITLE = "q27app"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[Any]] = [("q", "leave", "Quit"), ("question_mark", "help", "Help"), ("f1", "help", "Help")]
    SCREEN_NAMES = ("monitor", "chat", "models", "logs", "doctor", "setup")

    def __init__(self, url: str, key: str = "", starter: Starter | None = None, *, is_ascii: bool = False, in_tmux: bool = False,
                 first: str = "monitor", history_path: Path | None = None, interval_s: float = INTERVAL_S,
                 clock: Callable[[], float] = time.monotonic, carry_out: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.animation_level = "none"
        self.address = url
        self.marks = Marks(is_ascii)
        self.is_frozen = self.is_hosting = False
        self.history_path = history_path
        self.carry_out = carry_out
        self.crash: Exception | None = None
        """A mistake of ours that ended the app; whoever runs it reports it once the terminal is itself again."""
        self.client: Client | None = None
        self.poller: Poller | None = None
        self._key, self._starter, self._first, self._in_tmux, self._clock = key, starter, first, in_tmux, clock
        self._interval_s, self._renewed_at = interval_s, 0.0
        self._frozen: _Frozen | None = None
        self._started_failure = ""
        self._screens_made: dict[str, Room] = {}

    # what screens read

    @property
    def snapshot(self) -> Snapshot | None:
        return self._frozen.snapshot if self._frozen else self.poller.snapshot if self.poller else None

    @property
    def recent(self) -> Sequence[dict[str, Any]]:
        return self._frozen.recent if self._frozen else self.poller.recent if self.poller else ()

    @property
    def log_events(self) -> Sequence[dict[str, Any]]:
        return self._frozen.log if self._frozen else self.poller.log if self.poller else ()

    @property
    def trends(self) -> Trends | None:
        return self.poller.trends if self.poller else None

    @property
    def failure(self) -> str:
        return self._started_failure or (self.poller.failure if self.poller else "")

    @property
    def events_failure(self) -> str:
        return self.failure or (self.poller.events_failure if self.poller else "")

    @property
    def age_s(self) -> float | None:
        return self.poller.age_s if self.poller else None

    # life

    def on_mount(self) -> None:
        """Show the first screen at once; the network comes after the first frame."""
        self._room("monitor")
        self.push_screen("monitor")
        if self._first != "monitor":
            self.call_after_refresh(self.go, self._first)
        self.set_interval(RENEW_S, self._renew_ages)
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        except (NotImplementedError, RuntimeError):
            pass  # not the main thread: whoever runs the app there ends it
        self.call_after_refresh(self._connect)

    def _connect(self) -> None:
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        self.run_worker(self._serve(), name="daemon", exit_on_error=True)

    async def _serve(self) -> None:
        """Attach or start, then poll until the app ends."""
        await asyncio.to_thread(__import__, "aiohttp")
        from q27app.client import Client

        try:
            async with self._daemon(), Client(self.address, self._key) as client:
                self.client = client
                self.poller = Poller(client, self.renew, self._interval_s, self._clock)
                await self.poller.run()
        except Q27Error as error:
            self._started_failure = clean(error, 400)
            self.notify(str(error), title="No daemon could be started", severity="error", timeout=30, markup=False)
            self.renew()
        finally:
            self.client = None

    @asynccontextmanager
    async def _daemon(self) -> AsyncIterator[None]:
        from q27app.client import Client

        if self._starter is not None:
            async with Client(self.address, self._key) as client:
                try:
                    await client.health()
                except Unreachable:
                    pass
                else:
                    self._starter = None
        if self._starter is None:
            yield
            return
        async with self._starter() as address:
            self.address, self.is_hosting = address, True
            yield

    def _handle_exception(self, error: Exception) -> None:
        self.crash = self.crash or error
        super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        """Textual's own report is left out: it prints local variables, and those hold texts of the conversation."""

    def _renew_ages(self) -> None:
        if time.monotonic() - self._renewed_at > RENEW_S / 2:
            self.renew()

    def renew(self) -> None:
        """Let the screen in front draw what is new."""
        self._renewed_at = time.monotonic()
        screen = self.screen if self._screen_stack else None
        if isinstance(screen, Room):
            screen.renew_if_whole()

    def _room(self, name: str) -> Room:
        if name not in self._screens_made:
            self._screens_made[name] = self._make_room(name)
            self.install_screen(self._screens_made[name], name)  # otherwise switching away would remove it
        return self._screens_made[name]

    def _make_room(self, name: str) -> Room:
        if name == "chat":
            from q27app.tui.screens.chat import Chat

            return Chat()
        if name == "models":
            from q27app.tui.screens.models import Models

            return Models()
        if name == "logs":
            from q27app.tui.screens.logs import Logs

            return Logs()
        if name == "doctor":
            from q27app.tui.screens.doctor import Doctor

            return Doctor()
        if name == "setup":
            from q27app.tui.screens.setup import Setup

            return Setup()
        return Monitor()

    def go(self, name: str) -> None:
        """Bring a screen to the front. Screens keep what they hold while another is in front."""
        if self.screen is not self._room(name):
            self.switch_screen(name)

    # actions

    def action_go(self, name: str) -> None:
        """Bring a screen to the front."""
        self.go(name)

    def action_freeze(self) -> None:
        """Keep what is shown, or go on."""
        self.is_frozen = not self.is_frozen
        self._frozen = _Frozen(self.snapshot, list(self.recent), list(self.log_events)) if self.is_frozen else None
        self.renew()

    def action_ask_now(self) -> None:
        """Don't wait for the interval."""
        if self.poller:
            self.poller.ask_now()

    def action_help(self) -> None:
        """The keys of this screen."""
        screen = self.screen
        if isinstance(screen, Room):
            sections: list[tuple[str, Sequence[tuple[str, str]]]] = [("Keys", screen.KEYS)]
            if screen is self._screens_made.get("chat"):
                from q27app.tui.commands import COMMANDS

                sections.append(("Commands", [(f"/{command.usage}", command.help) for command in COMMANDS]))
            self.push_screen(Help("help", sections))

    def action_leave(self) -> None:
        """Quit; asks if that stops a daemon which others may use."""
        if not self.is_hosting:
            self.exit()
            return

        def answered(is_sure: bool | None) -> None:
            if is_sure:
                self.exit()

        self.push_screen(Question("The daemon runs in this window and stops with it. Quit?"), answered)

    def action_load(self) -> None:
        """Load the model."""
        self._order("load", lambda client: client.load(wait=False))

    def action_unload(self) -> None:
        """Unload the model, after a question."""

        def answered(is_sure: bool | None) -> None:
            if is_sure:
                self._order("unload", lambda client: client.unload(wait=False))

        self.push_screen(Question("Unload the model? Its memory becomes free; the next request loads it again."), answered)

    def cancel_request(self, name: str) -> None:
        """End a request."""
        self._order(f"cancel {name}", lambda client: client.cancel(name))

    def _order(self, what: str, call: Callable[[Client], Any]) -> None:
        async def carry_out() -> None:
            if self.client is None:
                self.notify("not connected", severity="warning")
                return
            try:
                await call(self.client)
            except Q27Error as error:
                self.notify(str(error), title=what, severity="error", markup=False)
            else:
                self.notify(f"{what}: the daemon has taken the order.", markup=False)
            self.action_ask_now()

        self.run_worker(carry_out(), name=what)

    def action_export(self) -> None:
        """Write what is shown into a file of the working directory."""
        path = Path(time.strftime("q27app-status-%Y%m%d-%H%M%S.json"))
        status = dict(self.snapshot.raw) if self.snapshot else None
        content = {"status": status, "recent": list(self.recent), "log": list(self.log_events)}
        self.save(path, json.dumps(content, indent=2, default=str))

    def save(self, path: Path, text: str) -> bool:
        """Write a new file; says where, or why not."""
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self.notify(f"{path}: not written: {error.strerror}.", severity="error", markup=False)
            return False
        self.notify(f"written: {path.expanduser().absolute()}", markup=False)
        return True

    def copy(self, text: str, what: str) -> None:
        """Give text to the terminal's clipboard; a terminal doesn't say whether it has taken it."""
        self.copy_to_clipboard(text)
        self.notify(f"copied: {what}, {len(text):,} characters. Does your terminal not take it? Save it to a file.", markup=False)

    def copy_to_clipboard(self, text: str) -> None:
        """OSC 52, in tmux in both forms."""
        from q27app.tui.clipboard import copy_sequence

        self._clipboard = text
        if self._driver is not None:
            self._driver.write(copy_sequence(text, self._in_tmux))

    def get_system_commands(self, screen: Screen[Any]) -> Any:
        """The palette: Textual's own entries, the screens, and the actions of this screen."""
        yield from super().get_system_commands(screen)
        for name in self.SCREEN_NAMES:
            yield SystemCommand(f"Go to {name}", f"Show {name}", lambda name=name: self.go(name))
        yield SystemCommand("Load the model", "Ask the daemon to load it", self.action_load)
        yield SystemCommand("Unload the model", "Ask the daemon to free its memory", self.action_unload)
        yield SystemCommand("Export", "Write status, requests and log into a JSON file", self.action_export)
