"""Carries out what the set-up dialogue decided, once, at its end: the key, the configuration, the service, in this order.

Each is undone by nothing: what was written before a failure stays, and the error says what is still missing.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from q27app.config import config_path
from q27app.errors import Q27Error, UsageError
from q27app.paths import config_dir, ensured
from q27app.setup.settings_file import write_settings
from q27app.setup.wizard import Outcome

KEY_FILE = "keys"


def make_key(folder: Path | None = None) -> Path:
    """A file with one new key, readable by its owner only; one that is there already is kept. Raises UsageError."""
    path = ensured(folder or config_dir()) / KEY_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return path
    except OSError as error:
        raise UsageError(f"{path}: cannot be made: {error.strerror}.", "Make its folder writable.") from error
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write("# q27app: one key a line\n" + secrets.token_urlsafe(32) + "\n")
    return path


def finish(made: Outcome, tell: Callable[[str], None]) -> None:
    """Write and install. tell: gets a line for each thing that was done. Raises Q27Error."""
    if made.makes_key:
        key = make_key()
        made = replace(made, settings={**made.settings, "server.api_key_file": str(key)})
        tell(f"Key file: {key}")
    path = config_path()
    tell(f"Written: {path}" if write_settings(path, made.settings) else f"Unchanged: {path}")
    if made.service:
        _install(made.service == "linger", tell)


def _install(with_linger: bool, tell: Callable[[str], None]) -> None:
    from q27app.setup.service import control, enable_linger, install, unit_path

    was_there = unit_path().exists()
    try:
        tell(f"Service: {install()}")
        if was_there:
            control("restart")
        if with_linger:
            enable_linger()
            tell("Linger is enabled.")
    except Q27Error as error:
        raise type(error)(f"the configuration is written, the service is not installed: {error.message}", error.hint) from error
