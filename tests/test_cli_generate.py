"""generate and demo on the bundled model and on constructed ones: the whole path without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from q27app import cli_generate
from q27app.cli import run
from q27app.cli_run import QUESTIONS
from q27app.config import child_environment
from q27app.gpu import nvidia_device_exists
from q27app.weights.synthetic import synthesize

REPOSITORY = Path(__file__).resolve().parents[1]
ANSWER = "I am the small demo model that comes with q27app, and everything works."
QUESTION = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n")
without_gpu = pytest.mark.skipif(nvidia_device_exists(), reason="there is an NVIDIA device, so CUDA may work")


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    return synthesize(tmp_path_factory.mktemp("models") / "nano.q27")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return synthesize(tmp_path_factory.mktemp("models") / "dense.q27", wiring="dense")


def generate(capfd, *arguments: str) -> dict:
    assert run(["generate", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_the_demo_answers_a_question(capfd):
    assert run(["generate", "--control", "--prompt", QUESTION]) == 0
    assert capfd.readouterr().out == ANSWER + "\n"


def test_json_has_tokens_text_finish_and_timings(capfd):
    answer = generate(capfd, "--control", "--prompt", QUESTION)
    assert (answer["text"], answer["finish"]) == (ANSWER, "stop")
    assert len(answer["prompt_tokens"]) > 20
    assert 10 < len(answer["tokens"]) < 30
    assert {"load_ms", "total_ms", "prefill_tokens_per_s", "decode_tokens_per_s"} <= set(answer["timings"])


def test_a_chain_counts_on(nano, capfd):
    assert run(["generate", "--model", str(nano), "--tokens", "1000,1001,1002", "-n", "64"]) == 0
    assert capfd.readouterr().out.strip() == ",".join(str(token) for token in range(1003, 1067))


def test_a_long_prompt_comes_from_standard_input(nano):
    done = subprocess.run(
        [sys.executable, "-m", "q27app", "generate", "--model", str(nano), "--tokens", "-", "-n", "3", "--json"],
        input=",".join(map(str, range(300, 400))), capture_output=True, text=True, cwd=REPOSITORY, env=child_environment())
    assert json.loads(done.stdout)["tokens"] == [400, 401, 402]


def test_the_limit_ends_an_answer(capfd):
    answer = generate(capfd, "--prompt", "x", "-n", "5", "--ignore-eos")
    assert (len(answer["tokens"]), answer["finish"]) == (5, "length")
    assert generate(capfd, "--prompt", "x", "-n", "0")["tokens"] == []


def test_end_of_text_can_be_ignored(capfd):
    answer = generate(capfd, "--prompt", "x", "-n", "70", "--ignore-eos")
    assert (len(answer["tokens"]), answer["finish"]) == (70, "length")


def test_a_seed_fixes_the_text_and_another_changes_it(dense, capfd):
    arguments = ["--model", str(dense), "--tokens", "5,6,7", "-n", "12", "--temperature", "1", "--ignore-eos"]
    first = generate(capfd, *arguments, "--seed", "1")["tokens"]
    assert generate(capfd, *arguments, "--seed", "1")["tokens"] == first
    assert generate(capfd, *arguments, "--seed", "2")["tokens"] != first
    assert generate(capfd, *arguments, "--seed", "2", "--top-k", "1")["tokens"] == generate(
        capfd, *arguments, "--temperature", "0")["tokens"]


def test_dumped_logits_are_those_of_every_prompt_position(dense, tmp_path, capfd):
    target = tmp_path / "logits"  # no suffix is added
    answer = generate(capfd, "--model", str(dense), "--tokens", "5,6,7,8", "-n", "1", "--dump-logits", str(target))
    logits = np.load(target)
    assert (logits.shape, logits.dtype) == ((4, 2560), np.float32)
    assert answer["tokens"] == [int(np.argmax(logits[-1]))]


@pytest.mark.parametrize("arguments, code, needle", [
    (["--tokens", "99999"], 2, "99999"),
    pytest.param(["--prompt", "x", "--backend", "cuda"], 4, "error: ", marks=without_gpu),
    (["--prompt", "x", "-n", "1", "--dump-logits", "/no/such/folder/x.npy"], 2, "/no/such/folder"),
])
def test_what_cannot_be_done_is_said_once_with_its_exit_code(arguments, code, needle, capfd):
    assert run(["generate", *arguments]) == code
    captured = capfd.readouterr()
    assert needle in captured.err
    assert captured.err.count("error:") == 1 and "Traceback" not in captured.err


def test_an_interruption_cancels_and_leaves_with_130(monkeypatch, capfd):
    def interrupt(self, event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_generate._Answer, "add", interrupt)
    assert run(["generate", "--prompt", "x"]) == 130


def test_the_demo_command_streams_three_answers_over_http(tmp_path):
    environment = child_environment({"Q27APP_SERVER__API_KEYS": "must-not-matter"})
    done = subprocess.run([sys.executable, "-m", "q27app", "demo", "--backend", "numpy"], cwd=REPOSITORY, env=environment,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *answers, speed = done.stdout.splitlines()
    assert answers == [ANSWER, "The daemon listens on http://127.0.0.1:8027.", "27 + 15 = 42."]
    assert [line for line in done.stderr.splitlines() if line.startswith("> ")] == [f"> {question}" for question in QUESTIONS]
    assert " tokens, " in speed and "tokens/s" in speed


@without_gpu
def test_the_demo_command_leaves_with_its_daemons_exit_code():
    done = subprocess.run([sys.executable, "-m", "q27app", "demo", "--backend", "cuda"], cwd=REPOSITORY,
                          env=child_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 4
    assert "exit code 4" in done.stderr and "Traceback" not in done.stderr
