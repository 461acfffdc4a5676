"""The daemon's log on standard error and, when asked for, in a file that is rotated: one line an event, as text for people or as
JSON for programs. No prompt text."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TYPE_CHECKING

from q27app.errors import UsageError

if TYPE_CHECKING:
    from q27app.config import LogSection

FILES_KEPT = 3
"""Full log files that are kept beside the one being written."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts (RFC 3339, UTC, ms), level, event (the logger's name), msg."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _OwnersFile(RotatingFileHandler):
    """A log file that only its owner reads; what is full becomes NAME.1, NAME.2..."""

    def _open(self) -> IO[str]:
        return open(self.baseFilename, self.mode, encoding=self.encoding,  # noqa: SIM115
                    opener=lambda path, flags: os.open(path, flags, 0o600))


def open_log(section: LogSection, standard_error: bool = True, file: Path | None = None) -> list[logging.Handler]:
    """Send the package's log where the configuration says. Calling it again replaces the handlers.

    standard_error: false where the terminal belongs to a screen. file: the place where section.file names none. Raises UsageError
    when the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if standard_error else []
    path = Path(section.file).expanduser() if section.file else file
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_OwnersFile(path, maxBytes=section.file_mb << 20, backupCount=FILES_KEPT, encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"the log file {path} cannot be written: {error.strerror}.", "Name another place: log.file.") from None
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    logger = logging.getLogger("q27app")
    for old in [handler for handler in logger.handlers if getattr(handler, "is_q27app_log", False)]:
        logger.removeHandler(old)
        if isinstance(old, RotatingFileHandler):
            old.close()
    for handler in handlers:
        handler.is_q27app_log = True  # type: ignore[attr-defined]
        handler.setFormatter(JsonFormatter() if section.format == "json" else text)
        logger.addHandler(handler)
    logger.setLevel(section.level.upper())
    logger.propagate = False
    return handlers
