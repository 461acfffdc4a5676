"""Taking q27app off a machine: what there is to remove, with sizes, and removing it. A link goes, never what it points to."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from q27app.errors import Q27Error, why
from q27app.paths import cache_dir, config_dir, data_dir, models_dir, state_dir

LAUNCHER_MARK = "/q27app/program/bin/q27app"
MAX_FILES = 200_000


@dataclass(frozen=True)
class Item:
    """kind: service, program, launcher, models, data, configuration, cache, state. is_kept: only a purge removes it."""

    kind: str
    path: Path
    nbytes: int
    is_kept: bool


def find_items() -> list[Item]:
    """Everything of q27app that is there, in the order in which it goes; of the user who asks."""
    from q27app.setup.service import unit_path

    launcher = Path.home() / ".local" / "bin" / "q27app"
    known = [("service", unit_path(), False), ("launcher", launcher, False), ("program", data_dir() / "program", False),
             ("cache", cache_dir(), True), ("models", models_dir(), True), ("state", state_dir(), True),
             ("configuration", config_dir(), True), ("data", data_dir(), True)]
    found = []
    for kind, path, is_kept in known:
        if kind == "launcher" and not _is_ours(path):
            continue
        if os.path.lexists(path):
            found.append(Item(kind, path, size_of(path), is_kept))
    return found


def _is_ours(launcher: Path) -> bool:
    try:
        return LAUNCHER_MARK in launcher.read_text(errors="replace")[:4096] or LAUNCHER_MARK in os.readlink(launcher)
    except OSError:
        return False


def size_of(path: Path) -> int:
    """Bytes of a file or of all below a folder, links not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    size = count = 0
    for folder, _, files in os.walk(path):
        for name in files:
            count += 1
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
        if count > MAX_FILES:
            break
    return size


def remove(item: Item) -> str:
    """Take it away; what was done, in a line. Raises Q27Error naming what is in the way."""
    from q27app.setup.service import uninstall

    try:
        if item.kind == "service":
            return f"service: {'; '.join(uninstall())}"
        if item.path.is_symlink() or not item.path.is_dir():
            item.path.unlink(missing_ok=True)
        else:
            shutil.rmtree(item.path)
    except OSError as error:
        raise Q27Error(f"{item.path}: cannot be removed: {why(error)}.", "Remove it by hand.") from error
    return f"removed {item.path}"
