"""The chat's slash commands and settings: their names, what they take, how a value is checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from q27app.errors import UsageError


@dataclass(frozen=True)
class Command:
    """name: what is typed after the slash. usage: with its arguments."""

    name: str
    usage: str
    help: str


COMMANDS = tuple(Command(usage.split()[0], usage, text) for usage, text in (
    ("new", "begin another conversation"),
    ("history", "show or hide the list of conversations"),
    ("search TEXT", "list the conversations with this text"),
    ("find TEXT", "scroll up to this text"),
    ("rename TITLE", "give this conversation a title"),
    ("delete", "delete this conversation, after a question"),
    ("retry", "ask the last question again; the old answer stays as a branch"),
    ("edit", "put the last question into the prompt; sending it makes a branch"),
    ("branch", "show the next branch at the last fork"),
    ("stop", "stop the answer that streams"),
    ("copy [code]", "copy the last answer, or its last code block"),
    ("save PATH", "write the last answer into a new file"),
    ("export PATH", "write this conversation: .json with all branches, .md with this one"),
    ("import PATH", "read a conversation that was exported"),
    ("system [TEXT]", "set or clear the system prompt"),
    ("set [NAME VALUE]", "sampler settings; without a value back to the daemon's"),
    ("think on|off|auto", "ask for reasoning or not"),
    ("model [NAME]", "the name that is sent, or what the daemon serves"),
    ("monitor", "back to the monitor"),
    ("help", "keys and commands"),
    ("quit", "leave"),
))


@dataclass(frozen=True)
class Setting:
    """A number that a request may carry."""

    low: float
    high: float
    is_whole: bool
    help: str


SETTINGS = {
    "temperature": Setting(0, 100, False, "0 is greedy"),
    "top_p": Setting(0, 1, False, "1 = all"),
    "top_k": Setting(0, 1_000_000, True, "0 = all"),
    "min_p": Setting(0, 1, False, "0 = all"),
    "presence_penalty": Setting(-2, 2, False, "0 = none"),
    "frequency_penalty": Setting(-2, 2, False, "0 = none"),
    "seed": Setting(0, 2**63 - 1, True, "the same seed, the same answer"),
    "max_tokens": Setting(1, 1_048_576, True, "longest answer"),
}


def parse(line: str) -> tuple[Command, str]:
    """A line that begins with a slash: (command, the rest). Raises UsageError."""
    name, _, rest = line[1:].strip().partition(" ")
    found = [command for command in COMMANDS if command.name == name] or [
        command for command in COMMANDS if name and command.name.startswith(name)]
    if len(found) != 1:
        near = ", ".join(f"/{command.name}" for command in found or COMMANDS)
        raise UsageError(f"/{name[:40]} is {'not clear' if found else 'no command'}.", f"There is: {near}.")
    return found[0], rest.strip()


def with_setting(settings: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """The settings with one changed; an empty text removes it. Raises UsageError."""
    if name not in SETTINGS:
        raise UsageError(f"there is no setting {name[:40]!r}.", f"Settings: {', '.join(SETTINGS)}.")
    rule = SETTINGS[name]
    if not text:
        return {key: value for key, value in settings.items() if key != name}
    try:
        value = int(text) if rule.is_whole else float(text)
    except ValueError:
        value = float("nan")
    if not rule.low <= value <= rule.high:
        kind = "a whole number" if rule.is_whole else "a number"
        raise UsageError(f"{name} is {text[:40]!r}, expected {kind} from {rule.low:g} to {rule.high:g}.")
    return {**settings, name: value}


def request_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of the settings goes into a request, beside the messages."""
    fields = {name: settings[name] for name in SETTINGS if isinstance(settings.get(name), (int, float))}
    if settings.get("think") in ("on", "off"):
        fields["enable_thinking"] = settings["think"] == "on"
    if isinstance(settings.get("model"), str) and settings["model"]:
        fields["model"] = settings["model"]
    return fields


def words(settings: Mapping[str, Any]) -> str:
    """The settings that differ from the daemon's own, in a line."""
    shown = [f"{name} {settings[name]}" for name in ("model", *SETTINGS, "think") if settings.get(name) not in (None, "", "auto")]
    return ", ".join([*shown, *(["a system prompt"] if settings.get("system") else [])])
