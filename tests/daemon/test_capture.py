"""Captured requests, and what a repaired or unreadable call leaves behind."""

from __future__ import annotations

import json
import os
import stat

import pytest

from q27app.daemon.capture import Capture
from q27app.errors import UsageError

TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
BODY = {"max_tokens": 900, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


def files(folder) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


async def test_nothing_is_kept_unless_a_folder_is_set(start, tmp_path):
    running = await start()
    await running.post("/v1/messages", BODY)
    assert running.daemon.capture is None
    assert [path for path in tmp_path.rglob("*") if "request" in path.name] == []


async def test_requests_are_kept_for_their_owner_alone(start, with_server, tmp_path):
    folder = tmp_path / "kept"
    bad = '<tool_call>\n{"name": "lock", "arguments": {}}\n</tool_call>'
    running = await start([bad], config=with_server(capture=str(folder)))
    await running.post("/v1/messages", BODY)
    await running.post("/v1/messages", {"messages": 7})
    running.daemon.executor.shutdown(wait=True)
    good, refused = sorted(files(folder), key=lambda entry: entry["finish"] != "stop")
    assert good["body"] == BODY and good["missed"] == [bad] and good["num_missed_calls"] == 1
    assert refused["body"] == {"messages": 7} and refused["finish"] == "error:invalid_request"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_the_oldest_make_room_and_what_is_not_ours_stays(tmp_path):
    folder = tmp_path / "kept"
    capture = Capture(folder, 1000)
    (folder / "notes.txt").write_text("x" * 5000)
    for index in range(20):
        capture.write(f"n{index:02d}", {"text": "y" * 150})
        os.utime(folder / f"q27app-request-n{index:02d}.json", ns=(index, index))
    kept = sorted(path.name for path in folder.glob("q27app-request-*"))
    assert kept == [f"q27app-request-n{index}.json" for index in range(14, 20)]
    assert (folder / "notes.txt").exists()
    assert sum(path.stat().st_size for path in folder.glob("q27app-request-*")) <= 1000
    capture.write("large", {"text": "y" * 900})
    assert not (folder / "q27app-request-large.json").exists()


def test_a_folder_that_others_read_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="others can read"):
        Capture(tmp_path / "open", 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be captured"):
        Capture(tmp_path / "file", 1000)


async def test_a_repaired_call_is_counted_by_its_mistake(start, caplog):
    drifted = '<tool_call>\n{"name": "look", "arguments": {"path": "a\nb"}}\n</tool_call>'
    running = await start([drifted])
    with caplog.at_level("INFO", "q27app.requests"):
        _, reply = await running.post("/v1/messages", BODY)
    assert reply["content"][0]["input"] == {"path": "a\nb"}
    text = running.daemon.metrics.text().decode()
    counted = [line for line in text.splitlines() if line.startswith("q27app_tool_rescues_total{")]
    assert len(counted) == 1 and counted[0].endswith("} 1.0")
    mode = counted[0].partition('mode="')[2].partition('"')[0]
    assert 'q27app_tool_calls_total{result="rescued"} 1.0' in text
    assert f"rescued={mode}:1" in caplog.records[-1].getMessage()
