"""The log in a file: rotated, its owner's only, and named when it cannot be written."""

from __future__ import annotations

import json
import logging
import stat

import pytest

from q27app.config import LogSection
from q27app.daemon.logs import FILES_KEPT, open_log
from q27app.errors import UsageError

log = logging.getLogger("q27app.tests")


@pytest.fixture(autouse=True)
def restored():
    logger = logging.getLogger("q27app")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    for handler in logger.handlers:
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_a_full_file_is_rotated_and_few_are_kept(tmp_path, capfd):
    path = tmp_path / "new" / "q27app.log"
    open_log(LogSection(format="json", file=str(path), file_mb=1))
    for number in range(6 * 1024):
        log.info("%d %s", number, "x" * 1000)
    names = sorted(entry.name for entry in path.parent.iterdir())
    assert names == ["q27app.log", *(f"q27app.log.{i + 1}" for i in range(FILES_KEPT))]
    assert all(entry.stat().st_size <= 1 << 20 and stat.S_IMODE(entry.stat().st_mode) == 0o600 for entry in path.parent.iterdir())
    assert json.loads(path.read_text().splitlines()[-1])["msg"].startswith("6143 ")
    assert '"msg": "6143 ' in capfd.readouterr().err


def test_opening_again_replaces_the_handlers(tmp_path, capfd):
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    open_log(LogSection(file=str(first)))
    open_log(LogSection(level="warning"), standard_error=False, file=second)
    log.info("not severe enough")
    log.warning("seen once")
    assert first.read_text() == "" and second.read_text().count("seen once") == 1 and "not severe" not in second.read_text()
    assert capfd.readouterr().err == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    before = logging.getLogger("q27app").handlers[:]
    with pytest.raises(UsageError, match="log.file"):
        open_log(LogSection(file=str(tmp_path / "file" / "below.log")))
    assert logging.getLogger("q27app").handlers == before
