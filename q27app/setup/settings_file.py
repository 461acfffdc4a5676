"""Writes settings into config.toml: comments, order and everything else in it stay; the file is whole at every moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q27app.config import load_config
from q27app.config_values import MAX_FILE_BYTES
from q27app.errors import UsageError, why
from q27app.paths import ensured


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """The TOML `text` with "section.key" -> value in it. Raises UsageError for text that is not TOML."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        for name, value in settings.items():
            section, _, key = name.partition(".")
            if section not in document:
                document[section] = tomlkit.table()
            table = document[section]
            if not isinstance(table, Mapping):
                raise UsageError(f"{section!r} is not a section of the configuration.", f"Write [{section}] on a line of its own.")
            table[key] = list(value) if isinstance(value, tuple) else value
        return tomlkit.dumps(document)
    except TOMLKitError as error:
        raise UsageError(f"the configuration is not valid TOML: {error}.", "Correct it, then try again.") from error


def write_settings(path: Path, settings: Mapping[str, Any]) -> bool:
    """Put the settings into the file, which need not exist; False if it says so already. The result is checked as
    `load_config` does before it takes the file's place; a link is followed. Raises UsageError, and the file is as it was."""
    if not settings:
        return False
    target = path.resolve()
    try:
        text = target.read_text(encoding="utf-8") if target.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {why(error)}.", "Make it a UTF-8 text file that you may read.") from error
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: {len(text)} characters is too large for a configuration file.")
    changed = with_settings(text, settings)
    if changed == text:
        return False
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    ensured(target.parent)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=".config-", suffix=".toml")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(changed)
            file.flush()
            os.fsync(file.fileno())
        load_config(path=Path(aside))
        os.chmod(aside, mode)
        os.replace(aside, target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}.", "Make its folder writable.") from error
    finally:
        Path(aside).unlink(missing_ok=True)
    return True
