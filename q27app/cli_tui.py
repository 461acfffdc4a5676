"""Commands that talk to a daemon from the terminal: bare q27app (the screens), status, chat."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from q27app.errors import EXIT_OK, Q27Error, Unreachable, UsageError, why

if TYPE_CHECKING:
    from q27app.client import Client
    from q27app.config import Config
    from q27app.setup.checkpoints import Checkpoint
    from q27app.setup.wizard import Trial, Wizard
    from q27app.tui.talk import Answer

CHAT_HELP = '/new begins again, /system TEXT sets a system prompt, /quit leaves. """ begins and ends a text of many lines.'


def _connection(function: Callable[..., Any]) -> Callable[..., Any]:
    """The two options that say where the daemon is."""
    function = click.option("--key", metavar="KEY", help="API key, or @FILE; default: the configuration's.")(function)
    return click.option("--connect", metavar="URL", help="A daemon elsewhere; default: the configured address.")(function)


def _where(connect: str | None, key: str | None) -> tuple[str, str]:
    """(URL, key), from these options, those of bare q27app, or the configuration. A configured key goes to no other address."""
    from q27app.client import base_url
    from q27app.config import load_config

    outer = click.get_current_context().find_root().params
    connect, key = connect or outer.get("connect"), key or outer.get("key")
    if key and key.startswith("@"):
        key = _first_key(Path(key[1:]))
    if connect:
        if not connect.startswith(("http://", "https://")):
            connect = f"http://{connect}"
        return connect.rstrip("/"), key or ""
    config = load_config()
    return base_url(config.server.host, config.server.port), key or _configured_key(config)


def _configured_key(config: Config) -> str:
    server = config.server
    for keys in (server.admin_keys, server.api_keys):
        if keys:
            return keys[0]
    return _first_key(Path(server.api_key_file)) if server.api_key_file else ""


def _first_key(path: Path) -> str:
    """The first line that is a key. Raises UsageError."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the key cannot be read: {why(error)}.") from error
    return next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")


def open_tui(connect: str | None, key: str | None, is_ascii: bool, use_mouse: bool) -> int:
    """The screens, on the daemon at `connect`, on the configured one, or on one that starts in this process; the exit code."""
    from q27app.config import load_config
    from q27app.tui.guard import run_guarded

    url, key = _where(connect, key)
    config = None if connect else load_config()
    return run_guarded(sys.stdout.fileno(), lambda: _run_screens(url, key or "", config, is_ascii, use_mouse))


def _run_screens(url: str, key: str, config: Config | None, is_ascii: bool, use_mouse: bool) -> int:
    """config: of the daemon to start if none answers; None: start none."""
    from q27app.config import set_process_variable, variable

    if variable("SSH_CONNECTION"):
        set_process_variable("TEXTUAL_FPS", "10")
        set_process_variable("TEXTUAL_SMOOTH_SCROLL", "0")
    gc.disable()  # until the first frame: looking for garbage among what is being imported takes a tenth of the time
    from q27app.tui.app import Q27App

    is_ascii = is_ascii or "utf" not in (sys.stdout.encoding or "").lower()
    starter = None if config is None else lambda: _hosting(config)
    app = Q27App(url, key, starter, is_ascii=is_ascii, in_tmux=bool(variable("TMUX")), carry_out=_carry_out)
    app.run(mouse=use_mouse)
    if app.crash is None:
        return EXIT_OK
    from q27app.cli import report_crash

    return report_crash(app.crash)


def _carry_out(wizard: Wizard) -> Checkpoint | Trial:
    """What a state of the set-up asks for, as the command does it."""
    from q27app.cli_wizard import carry_out

    return carry_out(wizard)


@asynccontextmanager
async def _hosting(config: Config) -> AsyncIterator[str]:
    """A daemon on the running loop; its log goes into a file, because the terminal is taken. Gives the address."""
    from q27app.daemon.access import check_exposure, load_keys
    from q27app.daemon.logs import open_log
    from q27app.daemon.parts import open_parts
    from q27app.daemon.serve import hosting
    from q27app.paths import state_dir

    check_exposure(config, load_keys(config))
    open_log(config.log, standard_error=False, file=state_dir() / "daemon.log")
    engine, tokenizer, template = await asyncio.to_thread(open_parts, config)
    async with hosting(engine, tokenizer, template, config) as (address, _):
        yield address


@click.command()
@click.option("--watch", "-w", is_flag=True, help="Again and again, until interrupted.")
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.2, 3600), help="Seconds between two looks.")
@click.option("--plain", is_flag=True, help="With --watch: never move the cursor, print what has changed.")
@click.option("--json", "as_json", is_flag=True, help="The daemon's own JSON, an object a line.")
@_connection
def status(watch: bool, interval: float, plain: bool, as_json: bool, connect: str | None, key: str | None) -> None:
    """Show what the daemon does.

    Exit code 7 if none answers.
    """
    from q27app.config import no_color

    url, key = _where(connect, key)
    is_redrawn = watch and not plain and not as_json and sys.stdout.isatty() and not no_color()
    asyncio.run(_show_status(url, key, interval if watch else None, as_json, is_redrawn))


async def _show_status(url: str, key: str, interval_s: float | None, as_json: bool, is_redrawn: bool) -> None:
    """interval_s None: once."""
    from q27app.client import Client
    from q27app.tui.plain import changed_lines, status_lines
    from q27app.tui.snapshot import Snapshot

    before: list[str] = []
    async with Client(url, key) as client:
        while True:
            try:
                raw = await client.status()
                lines = [json.dumps(raw)] if as_json else status_lines(Snapshot(raw), url)
            except Unreachable as error:
                if interval_s is None:
                    raise
                lines = [f"{'state:':<16} no answer", f"{'error:':<16} {error.message}"]
                lines = [json.dumps({"error": error.message})] if as_json else lines
            if is_redrawn:
                click.echo("\x1b[H\x1b[J" + "\n".join(lines))
            else:
                click.echo("".join(line + "\n" for line in (lines if as_json else changed_lines(before, lines))), nl=False)
            before = lines
            if interval_s is None:
                return
            await asyncio.sleep(interval_s)


@click.command()
@click.argument("prompt", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object when the answer is complete.")
@click.option("--system", metavar="TEXT", default="", help="A system prompt.")
@click.option("--model", metavar="NAME", help="The name that is sent.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@click.option("--seed", type=click.IntRange(0), help="The same seed, the same answer.")
@click.option("--think", type=click.Choice(["auto", "on", "off"]), default="auto", help="Ask for reasoning or not.")
@click.option("--reasoning", is_flag=True, help="Print reasoning to standard error.")
@_connection
def chat(prompt: str | None, as_json: bool, system: str, model: str | None, temperature: float | None, max_tokens: int | None,
         seed: int | None, think: str, reasoning: bool, connect: str | None, key: str | None) -> None:
    """Ask the daemon's model something.

    With PROMPT, or with a text on standard input ("-" or a pipe), once; without, line by line. For the full screen run q27app
    and press c.
    """
    from q27app.tui.commands import request_fields

    url, key = _where(connect, key)
    settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "seed": seed, "think": think}
    session = _Session(url, key, request_fields(settings), system, reasoning)
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is None:
        if as_json:
            raise UsageError("--json needs a PROMPT.")
        session.talk()
        return
    if not prompt.strip():
        raise UsageError("the prompt is empty.")
    answer = session.ask(prompt, is_silent=as_json)
    if as_json:
        click.echo(json.dumps({"text": answer.text, "reasoning": answer.reasoning, "calls": answer.calls, **answer.stats}))


class _Session:
    """A conversation without a screen. `messages` is what the daemon gets with the next question."""

    def __init__(self, url: str, key: str, fields: dict[str, Any], system: str, shows_reasoning: bool) -> None:
        self.url, self.key, self.fields, self.shows_reasoning = url, key, fields, shows_reasoning
        self.system = system
        self.messages: list[dict[str, Any]] = []

    def talk(self) -> None:
        """Read lines until the end of input."""
        click.echo(CHAT_HELP, err=True)
        while (text := _read_text()) is not None:
            command, _, rest = text.strip().partition(" ")
            if command == "/quit":
                return
            if command == "/new":
                self.messages = []
                click.echo("a new conversation", err=True)
            elif command == "/system":
                self.system = rest
            elif command.startswith("/"):
                click.echo(CHAT_HELP, err=True)
            elif text.strip():
                self._ask_kindly(text)

    def _ask_kindly(self, text: str) -> None:
        """A failed or stopped answer does not end the conversation."""
        try:
            answer = self.ask(text)
            words = [f"{answer.stats.get('num_generated', 0)} tokens"]
            if answer.stats.get("tokens_per_s"):
                words.append(f"{answer.stats['tokens_per_s']} tokens/s")
            click.echo(f"({', '.join(words)})", err=True)
        except Q27Error as error:
            click.echo(f"\nerror: {error}", err=True)
        except KeyboardInterrupt:
            click.echo("\nstopped", err=True)

    def ask(self, text: str, is_silent: bool = False) -> Answer:
        """Print the answer as it comes. It and the question join the conversation only if it comes to its end."""
        from q27app.tui.talk import Answer, call_text

        answer = Answer()
        head = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        asyncio.run(self._receive(answer, [*head, *self.messages, question], is_silent))
        if not is_silent:
            click.echo("".join("\n" + call_text(call) for call in answer.calls))
        reply = {"role": "assistant", "content": answer.text}
        self.messages += [question, reply | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})]
        return answer

    async def _receive(self, answer: Answer, messages: list[dict[str, Any]], is_silent: bool) -> None:
        from q27app.client import Client
        from q27app.tui.snapshot import printable

        is_terminal = sys.stdout.isatty()
        async with Client(self.url, self.key) as client, aclosing(_chat(client, messages, self.fields)) as pieces:
            async for piece in pieces:
                answer.take(piece)
                if piece.kind == "text" and not is_silent:
                    click.echo(printable(piece.text) if is_terminal else piece.text, nl=False)
                elif piece.kind == "reasoning" and self.shows_reasoning:
                    click.echo(printable(piece.text), nl=False, err=True)


def _chat(client: Client, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Any:
    return client.chat(messages, **fields)


def _read_text() -> str | None:
    '''A line, or the lines between two """; None at the end of input.'''
    try:
        line = input("you> ")
        if not line.lstrip().startswith('"""'):
            return line
        lines = [line.lstrip()[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input("...> "))
        return "\n".join(lines).rstrip().removesuffix('"""')
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None
