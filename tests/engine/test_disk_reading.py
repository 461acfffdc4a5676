"""A payload on its way into memory: stopped, without threads, and when the cache is closed meanwhile."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from q27app.engine import disk_entry, disk_reading
from q27app.engine.disk_entry import read_head
from q27app.engine.disk_reading import Reading
from tests.engine.test_disk_cache import MARK, open_cache, whole, write
from tests.engine.waiting import until


def held_check(monkeypatch) -> tuple[threading.Event, list[int]]:
    """Chunks are checked when the event is set; how many have been."""
    gate, seen, check = threading.Event(), [], disk_reading.is_digest
    monkeypatch.setattr(disk_entry, "CHUNK", 50)
    monkeypatch.setattr(disk_reading, "is_digest", lambda *rest: seen.append(1) or gate.wait(60) and check(*rest))
    return gate, seen


def test_a_reading_that_is_stopped_begins_no_other_chunk(tmp_path, monkeypatch):
    gate, seen = held_check(monkeypatch)
    entry = read_head(write(tmp_path), MARK)
    with ThreadPoolExecutor(1) as readers:
        begun, queued = Reading(entry, readers), Reading(entry, readers)
        while not seen:
            time.sleep(0.001)
        begun.stop(), queued.stop()
        gate.set()
        assert whole(begun) is None and whole(queued) is None
    assert len(seen) == 1 < len(entry.digests)
    assert not begun.is_files_fault and not queued.is_files_fault


def test_closing_does_not_wait_for_what_is_read_early(tmp_path, monkeypatch):
    gate, seen = held_check(monkeypatch)
    entry = read_head(write(tmp_path), MARK)
    cache = open_cache(tmp_path)
    cache.read_early(1000, 512, 100)
    while len(seen) < min(disk_entry.READERS, len(entry.digests)):
        time.sleep(0.001)
    readings = list(cache._early)
    lets_go = threading.Thread(target=lambda: (until(lambda: any(reading._is_stopped for reading in readings)), gate.set()))
    lets_go.start()
    cache.close()
    lets_go.join()
    assert len(seen) <= disk_entry.READERS and entry.path.exists()


def test_a_reading_without_a_thread_is_damaged_for_good(tmp_path):
    """An executor takes the work before it fails to start a thread, and another one may do it later."""
    queued = []

    class NoThreads:
        def submit(self, *work):
            queued.append(work)
            raise RuntimeError("can't start new thread")

    reading = Reading(read_head(write(tmp_path), MARK), NoThreads())
    assert reading.is_over and reading.is_damaged
    for work, *rest in queued:
        work(*rest)
    assert reading.is_damaged and not reading.is_files_fault


def test_the_file_stays_open_while_helpers_read_it(tmp_path, monkeypatch):
    """Also where no other helper is to be had."""
    monkeypatch.setattr(disk_entry, "CHUNK", 50)
    monkeypatch.setattr(disk_reading, "READERS", 4)
    helped, closed, inner = threading.Event(), [], Reading._work

    def work(self, descriptor):
        helped.set()
        time.sleep(0.1)
        try:
            os.fstat(descriptor)
        except OSError:
            closed.append(descriptor)
        return inner(self, descriptor)

    class OneHelper(ThreadPoolExecutor):
        def submit(self, *what):
            if helped.is_set():
                raise RuntimeError("can't start new thread")
            future = super().submit(*what)
            if what[0].__name__ == "work":
                helped.wait(60)
            return future

    monkeypatch.setattr(Reading, "_work", work)
    with OneHelper(4) as readers:
        assert whole(Reading(read_head(write(tmp_path), MARK), readers)) is None
    assert helped.is_set() and not closed
