"""Benchmarks over HTTP against a server whose answers are known."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import patch

import pytest

from q27app.bench.exchange import Exchange
from q27app.bench.prompts import filler, haystack, needle
from q27app.bench.soak import summary
from q27app.cli import run

from .openai_double import OpenAIDouble

SPEED = ["--depths", "0,300", "--depth-runs", "2", "--tokens", "4", "--runs", "2", "--warmups", "1", "--max-tokens", "5", "--pause", "0"]


def bench(capfd, *arguments: str) -> dict:
    """The JSON of a successful benchmark."""
    with patch.object(sys, "argv", ["q27app", "bench", *arguments]):
        code = run(["bench", *arguments, "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_speed_reads_prompts_cold_and_warm(capfd, tmp_path):
    with OpenAIDouble(delay_s=0.01) as server:
        report = bench(capfd, "speed", "--url", f"it={server.url}/v1", *SPEED, "--csv", str(tmp_path / "t.csv"))
    rows = {row["test"]: row for row in report["rows"]}
    assert set(rows) == {"narrative", "code", "depth 0", "depth 300"}
    deep = rows["depth 300"]
    assert (deep["runs"], deep["server"], deep["num_tokens"]) == (2, "it", 4)
    assert deep["reuse_percent"] > 99 and deep["num_prompt"] == pytest.approx(300, rel=0.1)
    assert report["stamp"]["command"].startswith("q27app bench speed --url ") and report["stamp"]["version"]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert [line["test"] for line in lines] == list(rows)


def test_speed_is_that_at_which_tokens_come(capfd):
    """A machine that is taken stretches an answer, or brings its pieces at once; not each time."""
    alone, found = ["--depths", "-", "--prompts", "code", "--runs", "1", "--warmups", "0", "--max-tokens", "5", "--pause", "0"], []
    with OpenAIDouble(delay_s=0.01) as server:
        while len(found) < 100 and not (found and found[-1] and 10 < found[-1] < 105):
            found.append(bench(capfd, "speed", "--url", server.url, *alone)["rows"][0]["decode_per_s"])
    assert found[-1] and 10 < found[-1] < 105, found


def test_no_two_texts_of_a_measurement_are_alike(capfd):
    with OpenAIDouble() as server:
        bench(capfd, "speed", "--url", server.url, *SPEED)
        texts = [body["messages"][0]["content"] for body in server.bodies if body["max_tokens"] == 4]
    assert len(texts) == 8 and len({text[:25] for text in texts}) == 4


def test_a_server_without_usage_has_its_pieces_counted(capfd):
    with OpenAIDouble(tells_usage=False) as server:
        report = bench(capfd, "speed", "--url", server.url, *SPEED)
        asked = [body for body in server.bodies if body["max_tokens"] == 1]
    row = report["rows"][-1]
    assert (row["num_tokens"], row["is_counted"]) == (4, False)
    assert row["num_prompt"] == pytest.approx(300, rel=0.1) and row["prefill_per_s"] > 0
    assert [bool(body.get("stream")) for body in asked] == [False] * len(asked) and len(asked) == 2 + 4


def test_a_depth_that_the_window_does_not_hold_is_named_and_the_rest_measured(capfd):
    with OpenAIDouble(window=1200) as server:
        report = bench(capfd, "speed", "--url", server.url, *SPEED, "--depths", "0,3000,200")
        asked = len(server.bodies)
    rows = {row["test"]: row for row in report["rows"]}
    assert "too long" in rows["depth 3000"]["refused"] and rows["depth 3000"]["runs"] == 0
    assert rows["depth 200"]["num_tokens"] == 4 and "depth 3000: refused" in report["notes"][-1]
    assert asked == 2 + 2 * 3 + 2 * 2 * 2 + 2


def test_tokens_that_come_together_have_no_decode_speed():
    exchange = Exchange(0.0, [1.0, 1.0001, 1.0002], total_s=1.001, num_tokens=64, is_counted=True)
    assert exchange.decode_per_s is None
    exchange.arrivals = [1.0, 1.3, 1.6, 1.9]
    exchange.total_s = 2.0
    assert exchange.decode_per_s == pytest.approx(63)


def test_two_servers_share_a_table(capfd):
    with OpenAIDouble() as first, OpenAIDouble() as second:
        report = bench(capfd, "concurrency", "--url", f"a={first.url}", "--url", f"b={second.url}", "--streams", "1,3", "--tokens", "4")
    assert [(row["server"], row["streams"], row["num_tokens"]) for row in report["rows"]] == [
        ("a", 1, 4), ("a", 3, 12), ("b", 1, 4), ("b", 3, 12)]
    assert [row["errors"] for row in report["rows"]] == [0] * 4


def test_streams_that_all_fail_are_no_measurement(capfd, tmp_path):
    out = ["--out", str(tmp_path / "j"), "--streams", "1,2", "--tokens", "4"]
    with OpenAIDouble(fail_after=3) as server:
        assert run(["bench", "concurrency", "--url", f"it={server.url}", *out, "--json"]) == 1
    assert [row["streams"] for row in json.loads(capfd.readouterr().out)["rows"]] == [1]
    with OpenAIDouble(fail_after=3 + 1) as server:
        report = bench(capfd, "concurrency", "--url", f"it={server.url}", *out)
    assert [(row["streams"], row["errors"]) for row in report["rows"]] == [(1, 0), (2, 0)]


def test_turns_send_back_what_was_said(capfd):
    with OpenAIDouble() as server:
        report = bench(capfd, "turns", "--url", server.url, "--turns", "3", "--pause", "0", "--scale", "0.1", "--tokens", "3")
        last = server.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert last[2]["content"] == "word0 word1 word2 "
    prompts = [row["num_prompt"] for row in report["rows"]]
    assert prompts == sorted(set(prompts)) and report["totals"][0]["turns"] == 3


def test_a_transcript_is_the_same_for_the_same_seed(capfd):
    def transcript(seed: str) -> list:
        with OpenAIDouble() as server:
            bench(capfd, "turns", "--url", server.url, "--turns", "3", "--pause", "0", "--seed", seed)
            return [body["messages"] for body in server.bodies]

    assert transcript("4") == transcript("4") != transcript("5")


def test_needle_scores_what_is_found(capfd):
    def find(body: dict) -> list[str]:
        text = body["messages"][0]["content"]
        fact = re.search(r"Remember: .* is (\d{5})", text)
        return [fact[1] if fact and len(text) < 6000 else "no idea"]

    with OpenAIDouble(answer=find) as server:
        report = bench(capfd, "needle", "--url", server.url, "--lengths", "500,2000", "--depths", "0,100", "--trials", "2")
    assert [(row["length"], row["right_percent"], row["trials"]) for row in report["rows"]] == [(500, 100.0, 4), (2000, 0.0, 4)]


def test_a_needle_stands_where_it_is_wanted():
    for depth, low, high in ((0.0, 0.0, 0.1), (0.5, 0.4, 0.6), (1.0, 0.9, 1.0)):
        found = needle(3)
        text = haystack(3, 5000, depth, found)[0]["content"]
        assert text.count(found.answer) == 1 and low <= text.index(found.fact) / len(text) <= high
    assert filler(1, 300)[:20] != filler(2, 300)[:20]


def test_soak_says_what_went_wrong(capfd):
    with OpenAIDouble() as server:
        clean = bench(capfd, "soak", "--url", server.url, "--answers", "6", "--minutes", "1", "--streams", "2")["rows"][0]
    with OpenAIDouble(answer=lambda body: [" "]) as server:
        silent = bench(capfd, "soak", "--url", server.url, "--answers", "4", "--minutes", "1")["rows"][0]
    with OpenAIDouble(fail_after=3) as server:
        assert run(["bench", "soak", "--url", server.url, "--minutes", "1", "--streams", "1", "--json"]) == 1
    failed = json.loads(capfd.readouterr().out)
    assert (clean["verdict"], clean["empty"], clean["errors"]) == ("clean", 0, 0) and clean["answers"] >= 6
    assert "silent-empty" in silent["verdict"]
    assert failed["rows"][0]["errors"] == 5 and "errors" in failed["rows"][0]["verdict"]
    assert "Incomplete" in failed["notes"][-1]


@pytest.mark.parametrize("when, speed, process, card, verdict", [
    (750, (50, 49), (1e9, 1.02e9), (1e10, 1.001e10), "clean"), (500, (50, 40), (1e9, 1e9), (None, None), "slows"),
    (800, (50, 50), (1e9, 1.2e9), (None, None), "grows"), (800, (50, 50), (1e8, 1.3e8), (1e10, 1.05e10), "grows"),
    (800, (50, 50), (1e8, 1.3e8), (1e10, 1e10), "clean"), (500, (50, 50), (1e9, 3e9), (1e10, 2e10), "clean"),
])
def test_a_soaks_verdict_follows_from_its_parts(when, speed, process, card, verdict):
    rows = []
    for second in range(0, 1001, 10):
        late = second > when
        rows.append({"kind": "answer", "elapsed": second, "answer_per_s": speed[late], "is_empty": False, "num_cached": 5, "num_prompt": 10})
        rows.append({"kind": "memory", "elapsed": second, "process_bytes": process[late], "card_bytes": card[late]})
    found = summary(rows)
    assert found["verdict"] == verdict and found["reuse_percent"] == 50
    assert found["retention_percent"] == pytest.approx(100 * speed[1] / speed[0], rel=0.03)
    assert found["process_growth_mb"] == pytest.approx((process[1] - process[0]) / 1e6)


def test_canonical_compares_with_what_a_server_says(capfd):
    with OpenAIDouble() as server:
        answer = bench(capfd, "canonical", "--url", server.url)
        again = bench(capfd, "canonical", "--url", server.url, "--expect", answer["md5_text"].upper())
        assert run(["bench", "canonical", "--url", server.url, "--expect", "0" * 32, "--json"]) == 1
    assert answer["num_tokens"] == 128 and again["is_equal"] is True


@pytest.mark.parametrize("abilities, code, message", [
    ({"has_logprobs": False}, 0, "no log probabilities"),
    ({"takes_ids": False}, 1, "refuses a prompt of token ids"),
])
def test_canonical_explains_what_a_server_lacks(capfd, abilities, code, message):
    with OpenAIDouble(**abilities) as server:
        assert run(["bench", "canonical", "--url", server.url]) == code
    out, err = capfd.readouterr()
    assert message in out + err


def test_a_wrong_key_and_the_right_one(capfd, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with OpenAIDouble(key="secret") as server:
        assert run(["bench", "speed", "--url", server.url, "--key", "other"]) == 1
        assert "--key" in capfd.readouterr().err
        bench(capfd, "concurrency", "--url", server.url, "--streams", "1", "--key", f"@{tmp_path / 'key'}")


def test_nobody_there_and_no_such_path(capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert run(["bench", "speed", "--url", f"http://127.0.0.1:{free.getsockname()[1]}"]) == 7
    assert "does not answer" in capfd.readouterr().err
    with OpenAIDouble() as server:
        assert run(["bench", "speed", "--url", f"{server.url}/elsewhere"]) == 1
    assert "/v1/models" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--depths", "1,x"], ["--prompts", "poem"], ["--url", "a=http://x", "--url", "a=http://y"],
                                       ["--serve", "demo,speed=9"], ["--plot", "picture.bmp"]])
def test_wrong_usage_is_refused_before_anything_is_asked(capfd, arguments):
    assert run(["bench", "speed", *arguments]) == 2
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("how, interrupts", [
    (signal.SIGKILL, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_IGN),   # as a script starts what it has in the background
])
def test_an_interrupted_run_goes_on_without_repeating(tmp_path, capfd, how, interrupts):
    """The server keeps the run waiting for its fifth answer, so it cannot end before the signal comes."""
    out = tmp_path / "journal"
    command = ["turns", "--turns", "8", "--pause", "0", "--tokens", "4", "--scale", "0.1", "--out", str(out)]
    with OpenAIDouble(hold_after=4) as server:
        command += ["--url", f"it={server.url}"]
        child = subprocess.Popen([sys.executable, "-m", "q27app", "bench", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts))
        while len(server.bodies) < 5 and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(how)
        printed, complaint = child.communicate(timeout=120)
        assert out.read_bytes().count(b'"key": "it|turn') == 4 and b"Traceback" not in complaint
        if how != signal.SIGKILL:
            assert child.returncode == 130 and b"Incomplete" in printed
        server.hold_after, before = 10**9, len(server.bodies)
        report = bench(capfd, *command)
        asked = len(server.bodies) - before
    assert [row["turn"] for row in report["rows"]] == list(range(1, 9))
    assert asked == 4 + 1, "one unmeasured request brings the earlier turns back"
