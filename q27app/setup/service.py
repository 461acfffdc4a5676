"""The daemon as a systemd user service: the unit file, and systemctl, loginctl and journalctl behind plain functions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from q27app import errors
from q27app.config import child_environment, variable
from q27app.errors import Q27Error, UsageError
from q27app.paths import config_dir, ensured, state_dir

UNIT = "q27app.service"
NO_RESTART = (errors.EXIT_USAGE, errors.EXIT_FILE, errors.EXIT_GPU, errors.EXIT_MEMORY, errors.EXIT_ADDRESS)
"""Exit codes after which starting again would not help."""
TIMEOUT_S = 60.0
FOREGROUND = "Run it in the foreground: q27app serve."


class NoUserManager(Q27Error):
    """There is no systemd for this user: containers, su, cron, WSL without systemd."""

    code = "no_user_manager"


def unit_path() -> Path:
    """Where the user's systemd looks for the unit."""
    base = variable("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd" / "user" / UNIT


def _linger_note() -> Path:
    return state_dir() / "linger-enabled-by-q27app"


def unit_text(python: str = sys.executable, nvcc: str | None = None) -> str:
    """The unit with absolute paths: a service has no shell profile. nvcc: the compiler, looked for if None."""
    template = (Path(__file__).parent / UNIT).read_text(encoding="utf-8")
    compiler = nvcc or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    values = {"COMMAND": f'{_quoted(python)} -P -m q27app serve', "CONFIG": _escaped(str(config_dir())),
              "PATH": _quoted(f"{Path(compiler).parent}:/usr/local/bin:/usr/bin:/bin").strip('"'),
              "NO_RESTART": " ".join(map(str, NO_RESTART))}
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template


def _escaped(text: str) -> str:
    if any(ord(character) < 32 for character in text):
        raise UsageError(f"{text!r} cannot stand in a unit file.", "Use a folder without control characters.")
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    escaped = _escaped(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"' if " " in text or '"' in text else escaped


def run(*command: str, check: bool = True) -> str:
    """Output of a systemd program. Raises NoUserManager without one, Q27Error with its words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=child_environment(), check=False)
    except FileNotFoundError as error:
        raise NoUserManager(f"{command[0]} is not installed.", FOREGROUND) from error
    except subprocess.TimeoutExpired as error:
        raise Q27Error(f"{' '.join(command)} has not ended within {TIMEOUT_S:.0f} s.", "See: q27app service logs.") from error
    words = done.stderr.strip()
    if any(sign in words for sign in ("Failed to connect to", "not been booted with systemd", "No medium found")):
        raise NoUserManager(f"this login has no systemd user manager: {words.splitlines()[0]}", "It is missing in containers, after su, "
                            f"in cron and under WSL without systemd. {FOREGROUND}")
    if check and done.returncode:
        raise Q27Error(f"{' '.join(command)}: {words or f'exit code {done.returncode}'}", "See: q27app service logs.")
    return done.stdout


def manager_answers() -> bool:
    """Whether this login has a systemd that runs services for it."""
    try:
        run("systemctl", "--user", "show-environment")
    except Q27Error:
        return False
    return True


def install(start: bool = True) -> Path:
    """Write the unit, tell systemd, enable it, and start it if asked."""
    path = unit_path()
    run("systemctl", "--user", "show-environment")
    ensured(path.parent, 0o755)
    part = path.with_name(path.name + ".new")
    part.write_text(unit_text(), encoding="utf-8")
    part.replace(path)
    run("systemctl", "--user", "daemon-reload")
    run("systemctl", "--user", "enable", *(["--now"] if start else []), UNIT)
    return path


def uninstall() -> list[str]:
    """Stop, disable and remove the unit; linger too, if it was we who enabled it. What was done."""
    done = []
    path = unit_path()
    try:
        run("systemctl", "--user", "disable", "--now", UNIT, check=False)
    except NoUserManager:
        done.append("no systemd to tell")
    if path.exists():
        path.unlink()
        done.append(f"removed {path}")
        run("systemctl", "--user", "daemon-reload", check=False) if "no systemd to tell" not in done else None
    if _linger_note().exists():
        run("loginctl", "disable-linger", check=False)
        _linger_note().unlink()
        done.append("linger disabled again")
    return done


def control(verb: str) -> None:
    """start, stop, restart or reload. Raises UsageError if there is no unit."""
    if not unit_path().exists():
        raise UsageError("the service is not installed.", "Install it: q27app service install.")
    run("systemctl", "--user", verb, UNIT)


def describe() -> dict[str, str | bool | None]:
    """installed, active, state, restarts, pid, result, linger."""
    facts: dict[str, str | bool | None] = {"installed": unit_path().exists(), "linger": lingers()}
    text = run("systemctl", "--user", "show", UNIT, "--property=ActiveState,SubState,NRestarts,MainPID,Result,StatusText")
    return facts | dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def lingers() -> bool | None:
    """Whether services of this user outlive the login; None if nobody tells."""
    try:
        text = run("loginctl", "show-user", "--property=Linger", "--value", check=False).strip()
    except Q27Error:
        return None
    return {"yes": True, "no": False}.get(text)


def enable_linger() -> None:
    """Let the user's services run without a login, and remember that it was us."""
    run("loginctl", "enable-linger")
    (ensured(state_dir()) / _linger_note().name).write_text("")


def journal_command(follow: bool, lines: int) -> list[str]:
    """The command that shows the service's log."""
    return ["journalctl", "--user", "--unit", UNIT, "--lines", str(lines), "--output", "cat", *(["--follow"] if follow else [])]
