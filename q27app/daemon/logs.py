"""The daemon's log on standard error: one line an event, as text for people or as JSON for programs. No prompt text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q27app.config import LogSection


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


def open_log(section: LogSection) -> logging.Handler:
    """Send the package's log to standard error, as the configuration says. Calling it again replaces the handler."""
    logger = logging.getLogger("q27app")
    for old in [handler for handler in logger.handlers if getattr(handler, "is_q27app_log", False)]:
        logger.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.is_q27app_log = True  # type: ignore[attr-defined]
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if section.format == "json" else text)
    logger.addHandler(handler)
    logger.setLevel(section.level.upper())
    logger.propagate = False
    return handler
