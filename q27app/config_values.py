"""Reading and checking single configuration values: TOML with line numbers, environment text, types and bounds.

Knows no section by name; `config` owns the tables. Every refusal says where the value stands, what it is and what is
allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q27app.errors import UsageError, why

MAX_FILE_BYTES = 1 << 20
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Rule:
    """What a field allows beside its type."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """kind: default, card, preset, file, environment or flag; where: preset, file path, variable or flag; line: in a file, from 1."""

    kind: str
    where: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.where}:{self.line}" if self.line else self.where
        return f"{self.kind} {place}".strip()


def read_file(path: Path) -> Iterator[tuple[str, str | None, Any, int]]:
    """Yield (section, key, value, line) of a TOML file; absent file: nothing. key None: a value outside any section;
    key "": the section itself."""
    import tomllib

    try:
        if not path.exists():
            return
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: {path.stat().st_size} bytes is too large for a configuration file.",
                             f"At most {MAX_FILE_BYTES} bytes.")
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{path}:{line.group(1)}" if line else str(path)
        raise UsageError(f"{place}: not valid TOML: {error}.", 'Write key = value lines below a [section].') from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {why(error)}.", "Make it a UTF-8 text file that you may read.") from error
    lines = _lines_of_keys(text)
    for section, content in tree.items():
        if not isinstance(content, dict):
            yield section, None, content, lines.get((section,), 1)
        else:
            yield section, "", None, lines.get((section,), 1)
            for key, value in content.items():
                yield section, key, value, lines.get((section, key), lines.get((section,), 1))


def _lines_of_keys(text: str) -> dict[tuple[str, ...], int]:
    """Line number of each [section] and key. A line in a multi-line string may be taken for a key; only the number in a
    message suffers."""
    found: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\]\[]+)\]", line)
        assignment = re.match(r"""\s*([A-Za-z0-9_\-."' ]+?)\s*=""", line)
        if header:
            section = _dotted(header.group(1))
            found.setdefault(section, number)
        elif assignment:
            names = section + _dotted(assignment.group(1))
            for depth in range(1, len(names) + 1):
                found.setdefault(names[:depth], number)
    return found


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def parse_words(text: str, kind: str, where: str) -> Any:
    """The value that an environment variable's text means for a field of type `kind` (an annotation's source)."""
    text = text.strip()
    if kind == "bool":
        if text.lower() not in _TRUE + _FALSE:
            raise UsageError(f"{where}: {text!r} is neither true nor false.", "Allowed: true, false.")
        return text.lower() in _TRUE
    if kind.startswith("tuple"):
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind in ("int", "int | str", "float"):
        try:
            return float(text) if kind == "float" else int(text)
        except ValueError:
            return text
    return text


def check_value(value: Any, kind: str, rule: Rule, where: str) -> Any:
    """`value` as the field's type, or UsageError. kind: bool, int, float, str, int | str, tuple[str, ...]."""
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind.startswith("tuple") and isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if kind in ("int", "int | str") and isinstance(value, int) and not isinstance(value, bool):
        return _bounded(value, kind, rule, where)
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return _bounded(float(value), kind, rule, where)
    if kind == "int | str" and isinstance(value, str):
        if value in rule.words:
            return value
        if re.fullmatch(r"[+-]?\d{1,18}", value):
            return _bounded(int(value), kind, rule, where)
    if kind == "str" and isinstance(value, str) and (not rule.choices or value in rule.choices):
        return value
    raise UsageError(f"{where} is {_shown(value)}.", f"Allowed: {allowed(kind, rule)}.")


def _bounded(value: Any, kind: str, rule: Rule, where: str) -> Any:
    if (rule.low is not None and value < rule.low) or (rule.high is not None and value > rule.high):
        raise UsageError(f"{where} is {value}.", f"Allowed: {allowed(kind, rule)}.")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def allowed(kind: str, rule: Rule) -> str:
    """In words what a field takes."""
    if rule.choices:
        return ", ".join(choice or '""' for choice in rule.choices)
    if kind == "bool":
        return "true, false"
    if kind.startswith("tuple"):
        return "a list of strings"
    if kind == "str":
        return "a string"
    noun = "a whole number" if kind.startswith("int") else "a number"
    bounds = "" if rule.low is None else f" from {rule.low:g} to {int(rule.high) if rule.high else rule.high}"
    return " or ".join([noun + bounds, *rule.words])
