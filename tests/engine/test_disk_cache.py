"""States on disk: damaged, half written, shared and foreign files are misses; what is read is what was written."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from q27app.engine import disk_cache, disk_entry, disk_reading
from q27app.engine.disk_cache import DiskCache, clear, describe, evict
from q27app.engine.disk_entry import entries_of, read_head, remove_leftovers, write_entry
from q27app.engine.disk_reading import Reading
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig
from q27app.engine.request import Request, SamplingParams
from q27app.errors import GpuError
from tests.engine.test_prefix_toy import ask, desk_of, prompt_of
from tests.engine.conversations import settle_all

MARK, OTHER = b"m" * 32, b"o" * 32


def state_of(size: int, seed: int = 0, slot_bytes: int = 1000, block_bytes: int = 512):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, size, dtype=np.int32)
    return tokens, rng.integers(0, 256, slot_bytes, dtype=np.uint8), rng.integers(
        0, 256, (size // 64, block_bytes), dtype=np.uint8)


def write(folder, size=128, seed=0, kind="turn", fingerprint=MARK):
    tokens, slot, blocks = state_of(size, seed)
    return write_entry(folder, fingerprint, kind, tokens, slot, blocks)


def whole(reading: Reading):
    """(slot, blocks) once it is over; None where it was damaged."""
    while not reading.is_over:
        reading.wait(reading.num_bytes, 20)
    return None if reading.is_damaged else (reading.slot(), reading.blocks(0, reading.num_blocks))


def read_payload(entry):
    with ThreadPoolExecutor(3) as readers:
        return whole(Reading(entry, readers))


def read(cache: DiskCache, entry):
    reading = cache.begin_read(entry)
    found = whole(reading)
    assert cache.end_read(reading) == (found is not None)
    return found


def open_cache(folder, budget=1 << 30, **options) -> DiskCache:
    return DiskCache(folder, MARK, budget, **{"min_tokens": 64, "step": 64, **options})


def longest(cache: DiskCache, prompt, least=64):
    return next(cache.candidates(np.asarray(prompt, np.int32), least), None)


@pytest.mark.parametrize("chunk", [100, 1000, 16 << 20])
def test_an_entry_reads_as_it_was_written(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(disk_entry, "CHUNK", chunk)
    tokens, slot, blocks = state_of(192)
    path = write_entry(tmp_path, MARK, "system", tokens, slot, blocks)
    entry = read_head(path, MARK)
    assert entry.kind == "system" and np.array_equal(entry.tokens, tokens)
    read_slot, read_blocks = read_payload(entry)
    assert np.array_equal(read_slot, slot) and np.array_equal(read_blocks, blocks)
    assert os.stat(path).st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]
    assert read_head(path, OTHER) is None


def test_every_damaged_byte_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_entry, "CHUNK", 70)
    tokens, slot, blocks = state_of(64, slot_bytes=100, block_bytes=60)
    path = write_entry(tmp_path, MARK, "turn", tokens, slot, blocks)
    entry, whole = read_head(path, MARK), path.read_bytes()
    for place in range(0, len(whole), 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1:])
        again = read_head(path, MARK)
        assert again is None or read_payload(again) is None, place
        assert read_payload(entry) is None, place
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_head(path, MARK) is None
    path.write_bytes(whole + b"x")
    assert read_head(path, MARK) is None


def test_the_longest_entry_that_the_prompt_begins_with_is_offered_first(tmp_path):
    tokens, slot, blocks = state_of(256)
    for size in (64, 192, 256):
        write_entry(tmp_path, MARK, "turn", tokens[:size], slot, blocks[:size // 64])
    write(tmp_path, 128, seed=9)
    write_entry(tmp_path, OTHER, "turn", tokens[:128], slot, blocks[:2])
    cache = open_cache(tmp_path)
    prompt = np.concatenate([tokens, [1]])
    assert [entry.num_tokens for entry in cache.candidates(prompt, 64)] == [256, 192, 64]
    assert [entry.num_tokens for entry in cache.candidates(tokens, 128)] == [192]
    changed = prompt.copy()
    changed[100] += 1
    assert [entry.num_tokens for entry in cache.candidates(changed, 64)] == [64]
    cache.close()


def write_layout(folder, magic: bytes, seed: int, used_at: int = 0):
    path = write(folder, seed=seed)
    path.write_bytes(magic + path.read_bytes()[8:])
    os.utime(path, (used_at, used_at))
    return path


def test_entries_of_other_layouts_are_told_from_damaged_ones(tmp_path):
    kinds = {write_layout(tmp_path, magic, seed).name: kind for seed, (magic, kind) in enumerate({
        b"Q27SNAP1": "older", b"Q27SNAP2": "turn", b"Q27SNAP3": "newer", b"Q27SNAPx": "damaged", b"SNAPSHOT": "damaged"}.items())}
    cut = write(tmp_path, seed=77)
    cut.write_bytes(cut.read_bytes()[:-1])
    assert {row["name"]: row["kind"] for row in describe(tmp_path)} == kinds | {cut.name: "damaged"}


def test_entries_of_an_older_layout_go_at_start_and_before_all_others(tmp_path):
    good, older = write(tmp_path, seed=1), write_layout(tmp_path, b"Q27SNAP1", 2, used_at=1 << 33)
    assert evict(tmp_path, good.stat().st_size) == 1 and good.exists() and not older.exists()
    older, newer = write_layout(tmp_path, b"Q27SNAP1", 2), write_layout(tmp_path, b"Q27SNAP3", 3)
    cache = open_cache(tmp_path)
    assert sorted(entries_of(tmp_path)) == sorted([good, newer]) and cache.to_dict()["entries"] == 1
    cache.close()


def test_two_processes_share_a_folder(tmp_path):
    one, two = open_cache(tmp_path), open_cache(tmp_path)
    tokens, slot, blocks = state_of(128)
    one.write(tokens, "turn", slot, blocks)
    one.close()
    prompt = (*tokens, 5)
    entry = longest(two, prompt)
    assert entry is not None and not two.wants(tokens, "turn")
    assert two.to_dict()["entries"] == 1 and two.to_dict()["bytes"] == entry.path.stat().st_size
    entry.path.unlink()
    assert read(two, entry) is None and longest(two, prompt) is None and two.wants(tokens, "turn")
    two.close()


def test_a_turn_is_written_only_where_it_is_far_from_one_that_is_there(tmp_path):
    tokens, slot, blocks = state_of(640)
    write_entry(tmp_path, MARK, "turn", tokens[:256], slot, blocks[:4])
    cache = open_cache(tmp_path, min_tokens=128, step=200)
    assert [cache.wants(tokens[:size], "turn") for size in (64, 128, 256, 320, 448, 512)] == [
        False, True, False, False, False, True]
    assert cache.wants(tokens[:320], "system")
    cache.close()


def test_the_least_recently_used_entries_go(tmp_path):
    paths = [write(tmp_path, 64, seed) for seed in range(4)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    cache = open_cache(tmp_path)
    tokens = state_of(64, 0)[0]
    assert read(cache, longest(cache, (*tokens, 1))) is not None
    assert evict(tmp_path, 2 * paths[0].stat().st_size + 10) == 2
    assert sorted(entries_of(tmp_path)) == sorted([paths[0], paths[3]])
    cache.close()


def test_what_a_dead_writer_left_is_removed_and_a_live_one_is_not_disturbed(tmp_path):
    left = tmp_path / ".writing-old"
    left.write_bytes(b"half")
    with open(tmp_path / ".writing-now", "wb") as file:
        assert disk_entry._lock(file)
        assert remove_leftovers(tmp_path) == 1 and not left.exists()
        assert (tmp_path / ".writing-now").exists()


def test_listing_and_clearing(tmp_path):
    write(tmp_path, 64), write(tmp_path, 128, 1, "system")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "broken.q27snap").write_bytes(b"rubbish")
    rows = {row["kind"]: row["tokens"] for row in describe(tmp_path)}
    assert rows == {"turn": 64, "system": 128, "damaged": 0}
    count, freed = clear(tmp_path)
    assert count == 3 and freed > 2000 and [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_used_switches_the_cache_off(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    cache = open_cache(tmp_path / "file")
    assert longest(cache, range(100)) is None and not cache.is_free and not cache.wants(np.arange(640), "turn")
    assert sum("disk cache is off" in record.message for record in caplog.records) == 1
    cache.close()


def test_closing_does_not_wait_for_a_disk_that_is_off(tmp_path):
    (tmp_path / "file").write_text("x")
    desk = desk_of(folder=tmp_path / "file")
    ask(desk, prompt_of(200), system_len=128)
    closing = threading.Thread(target=desk.loaded.prefix_cache.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_whatever_fails_while_an_entry_is_written_the_next_one_is_written(tmp_path, monkeypatch, caplog):
    cache, real = open_cache(tmp_path), disk_cache.write_entry
    failures = [MemoryError("no room"), ValueError("odd")]
    monkeypatch.setattr(disk_cache, "write_entry", lambda *rest: (_ for _ in ()).throw(failures.pop()) if failures else real(*rest))
    for seed in range(3):
        tokens, slot, blocks = state_of(128, seed)
        cache.write(tokens, "turn", slot, blocks)
    cache.close()
    assert cache.num_failed == 2 and cache.num_written == 1
    assert sum("could not write" in record.message for record in caplog.records) == 2


def test_a_head_that_says_more_than_a_state_can_be_is_not_read(tmp_path, monkeypatch):
    """A file with holes may be as large as it says, and its head as large as memory."""
    monkeypatch.setattr(disk_entry, "CHUNK", 100)
    tokens, slot, blocks = state_of(128, slot_bytes=76)
    path = write_entry(tmp_path, MARK, "turn", tokens, slot, blocks)
    assert read_head(path, MARK) is not None
    monkeypatch.setattr(disk_entry, "MAX_CHUNKS", 10)
    assert read_head(path, MARK) is None and longest(open_cache(tmp_path), range(200)) is None


@pytest.mark.parametrize("slot_bytes, block_bytes", [(15, 512), (1 << 20, 512), (16, 511), (16, 1 << 16), (0, 0)])
def test_an_entry_of_other_sizes_than_a_state_has_is_not_read_whatever_its_head_says(tmp_path, slot_bytes, block_bytes):
    tokens = np.array(prompt_of(192), np.int32)
    write_entry(tmp_path, bytes(32), "turn", tokens, np.zeros(slot_bytes, np.uint8), np.zeros((3, block_bytes), np.uint8))
    desk = desk_of(folder=tmp_path)
    assert ask(desk, prompt_of(250)) == 0
    desk.loaded.prefix_cache.close()


def test_a_reader_that_fails_is_a_miss(tmp_path, monkeypatch):
    first = desk_of(folder=tmp_path)
    ask(first, prompt_of(200), system_len=128)
    settle_all(first)
    first.loaded.prefix_cache.close()
    monkeypatch.setattr(disk_reading, "is_digest", lambda *rest: (_ for _ in ()).throw(MemoryError("no room")))
    second, files = desk_of(folder=tmp_path), set(entries_of(tmp_path))
    assert ask(second, prompt_of(250)) == 0 and second.loaded.prefix_cache.to_dict()["disk"]["failed"] == 1
    assert files <= set(entries_of(tmp_path)), "the file is not to blame"
    second.loaded.prefix_cache.close()


@pytest.mark.parametrize("dies", [True, False])
def test_what_an_engine_that_died_had_not_written_yet_is_not_written(tmp_path, dies):
    """What it computed last cannot be trusted."""
    loaded = desk_of(folder=tmp_path).loaded
    loaded.close, phases = loaded.prefix_cache.close, []

    def before(batch):
        phases.append(batch.phase)
        if dies and phases.count("decode") == 5:
            raise GpuError("the card has gone")

    loaded.model.before = before
    engine = Engine(EngineConfig(), lambda config, progress: loaded)
    engine.start()
    engine.load().result(30)
    done = threading.Event()
    engine.submit(Request("r", prompt_of(200), SamplingParams(max_tokens=20), system_len=128), lambda event: event.finish and done.set())
    assert done.wait(30)
    engine.close()
    assert len(entries_of(tmp_path)) == (0 if dies else 1)


def test_a_file_is_deleted_for_its_own_faults_alone(tmp_path, monkeypatch):
    """Not where too many files are open, and not where another process has written it anew since its head was read."""
    path = write(tmp_path)
    cache = open_cache(tmp_path)
    prompt = (*state_of(128)[0], 1)
    for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        with monkeypatch.context() as patch:
            patch.setattr(disk_reading, "fill", lambda *_, code=code: (_ for _ in ()).throw(OSError(code, "none left")))
            assert read(cache, longest(cache, prompt)) is None and path.exists(), code
        cache._folder_time = -1   # as if the folder had changed
    known, (tokens, slot, blocks) = longest(cache, prompt), state_of(128)
    write_entry(tmp_path, MARK, "turn", tokens, slot + np.uint8(1), blocks)
    assert read(cache, known) is None and path.exists()
    cache._folder_time = -1
    assert read(cache, longest(cache, prompt)) is not None
    cache.close()


def flip(path, rng) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 50])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        data = data[:rng.randrange(len(data))]
    path.write_bytes(data)


def flips(tmp_path, count):
    """Damaged entries never change a text; the toy's text tells any wrong state."""
    rng, hits = random.Random(4), 0
    for round_ in range(count):
        folder = tmp_path / str(round_)
        base = prompt_of(200, round_)
        first = desk_of(folder=folder)
        ask(first, base)
        first.stepper.settle(base, 0)
        settle_all(first)
        first.loaded.prefix_cache.close()
        paths = list(entries_of(folder))
        assert paths
        if round_ % 4:
            flip(rng.choice(paths), rng)
        second = desk_of(folder=folder)
        reused = ask(second, base)
        hits += reused > 0
        assert reused in ((192,) if round_ % 4 == 0 else (0, 64, 128, 192))
        second.loaded.prefix_cache.close()
    assert 0 < hits < count


def test_flipped_bits_are_misses(tmp_path):
    flips(tmp_path, 12)


@pytest.mark.long
def test_many_flipped_bits_are_misses(tmp_path, long_scale):
    flips(tmp_path, max(10, int(400 * long_scale)))


WRITER = """
import sys
sys.path[:0] = [{root!r}]
from pathlib import Path
import numpy as np
from q27app.engine.disk_cache import DiskCache
cache = DiskCache(Path({folder!r}), b"m" * 32, 3_000_000, min_tokens=64, step=64)
for seed in range({first}, {first} + 100_000):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, 128, dtype=np.int32)
    cache.write(tokens, "turn", rng.integers(0, 256, 200_000, dtype=np.uint8), rng.integers(0, 256, (2, 512), dtype=np.uint8))
    while not cache.is_free:
        pass
    if seed == {first}:
        print("ready", flush=True)
"""


def kills(tmp_path, count):
    """A writer is killed again and again; whatever is there afterwards is whole."""
    rng, root = random.Random(1), os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    seen = left = 0
    for round_ in range(count):
        program = WRITER.format(root=root, folder=str(tmp_path), first=1000 * round_)
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        left += len(entries_of(tmp_path, ".writing-", ""))
        for path in entries_of(tmp_path):
            entry = read_head(path, MARK)
            assert entry is not None and read_payload(entry) is not None, f"round {round_}: {path.name} is not whole"
            seen += 1
        assert sum(path.stat().st_size for path in entries_of(tmp_path)) <= 3_300_000
    remove_leftovers(tmp_path)
    assert seen and not entries_of(tmp_path, ".writing-", "")
    return left


def test_a_killed_writer_leaves_whole_entries(tmp_path):
    kills(tmp_path, 4)


@pytest.mark.long
def test_a_writer_killed_often_leaves_whole_entries(tmp_path, long_scale):
    left = kills(tmp_path, max(5, int(200 * long_scale)))
    assert left or long_scale < 1, "no kill ever hit a write"
