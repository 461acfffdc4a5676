"""The command line: exit codes, what goes to which stream, and that nothing but a message reaches the user."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

from q27app import cli, paths
from q27app.cli import COMMANDS, run
from q27app.cli_generate import parse_ids
from q27app.cli_progress import Progress, human_bytes
from q27app.config import child_environment
from q27app.errors import FileFormatError, UsageError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def own_log_handlers():
    """`serve` run in this process gives the log to this test's standard error; it must not outlive the test."""
    log = logging.getLogger("q27app")
    before = (log.handlers[:], log.level, log.propagate)
    yield
    log.handlers[:], log.level, log.propagate = before


def start(*arguments: str, **options) -> subprocess.Popen:
    """q27app as a program of its own."""
    streams = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.Popen([sys.executable, "-m", "q27app", *arguments], cwd=REPOSITORY, env=child_environment(), **streams | options)


def finish(*arguments: str, given: bytes = b"", **options) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    program = start(*arguments, **options)
    out, err = program.communicate(given, timeout=120)
    return program.returncode, (out or b"").decode(), err.decode()


def test_help_is_quick():
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times, least = [], []
    for _ in range(3):  # processor time, so that a busy machine doesn't decide; the rest of the start is waiting for it
        before = spent()
        finish("--help")
        times.append(spent() - before)
        subprocess.run([sys.executable, "-c", "import click"], check=True)
        least.append(spent() - before - times[-1])
    assert min(times) < max(0.3, 4 * min(least)), "a slower machine takes longer for whatever begins"


def test_no_command_on_a_pipe_is_wrong_usage():
    code, out, err = finish()
    assert (code, out) == (2, "")
    assert err.startswith("error: the screens need a terminal") and "serve, demo" in err


@pytest.mark.parametrize("group", ["bench", "cache", "config", "kernels", "service", "tokens"])
def test_a_group_without_its_command_shows_the_help_and_says_so(group, capfd):
    assert run([group]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith(f"Usage: q27app {group}")
    assert captured.err.endswith(f"error: q27app {group} wants one of its commands.\n")


@pytest.mark.parametrize("arguments", [("list",), ("--help",), ("config", "show", "--json")])
def test_a_full_disk_is_no_mistake_of_ours(arguments):
    with open("/dev/full", "w") as full:
        code, _, err = finish(*arguments, stdout=full)
    assert code == 1
    assert err == "error: the output cannot be written: No space left on device.\n  Free some space, or have it written elsewhere.\n"


@pytest.mark.parametrize("arguments", [("list",), ("--version",), ("rm", "none")])
def test_a_program_without_an_output_is_no_mistake_of_ours(arguments):
    code, _, err = finish(*arguments, stdout=None, preexec_fn=lambda: os.close(1))
    assert code == (2 if arguments[0] == "rm" else 0) and "Traceback" not in err and "mistake" not in err


@pytest.mark.parametrize("arguments, says", [
    (["convert", "{folder}", "{folder}/x.q27"], "holds no config.json.\n  Give the folder of a Hugging Face model"),
    (["convert", "{demo}", "{folder}/x.q27"], "the file is a .q27 already"),
    (["synth", "{folder}/none/x.q27"], "cannot be written: No such file or directory.\n  Make the folder"),
    (["rm", "demo"], "demo is the bundled model, a part of the program"),
])
def test_what_was_expected_and_what_to_do_are_said(arguments, says, tmp_path, capfd):
    from q27app.paths import resolve_model

    assert run([part.format(folder=tmp_path, demo=resolve_model("demo")) for part in arguments]) in (2, 3)
    assert says in capfd.readouterr().err


def test_whether_a_model_fits_is_unknown_without_a_card(capfd, monkeypatch):
    monkeypatch.setattr("q27app.gpu.read_gpus", lambda: [])
    assert run(["show", "demo"]) == 0
    assert re.search(r"^fits +unknown$", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("arguments", [
    ["--frobnicate"], ["serve", "--frobnicate"], ["generate", "--prompt", "x", "--frobnicate"], ["nonsense"],
    ["generate"], ["generate", "--prompt", "x", "--tokens", "1"], ["generate", "--tokens", "1,x"],
    ["generate", "--tokens", ""], ["serve", "--port", "http"], ["serve", "--port", "70000"],
    ["serve", "--backend", "abacus"], ["serve", "--ctx", "huge"], ["serve", "--model", "no-such-model"],
    ["generate", "--prompt", "x", "--temperature", "-1"], ["generate", "--prompt", "x", "-n", "-1"],
    ["convert", "/no/such/folder", "x.q27"], ["inspect", "no-such-model"], ["synth"], ["config", "show", "extra"],
    ["tokens", "encode", "--model", "no-such-model"],
])
def test_wrong_usage_is_exit_2_with_a_message_and_no_traceback(arguments, capfd):
    assert run(arguments) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_near_miss_is_suggested(capfd):
    assert run(["serv"]) == 2
    assert "Did you mean 'serve'?" in capfd.readouterr().err


def test_a_bad_variable_is_exit_2(monkeypatch, capfd):
    monkeypatch.setenv("Q27APP_SERVER__PORT", "no")
    assert run(["config", "show"]) == 2
    assert "Q27APP_SERVER__PORT" in capfd.readouterr().err


def test_a_damaged_model_is_exit_3(tmp_path, capfd):
    (tmp_path / "bad.q27").write_bytes(b"not a model at all" * 10)
    assert run(["inspect", str(tmp_path / "bad.q27")]) == 3
    assert "bad.q27" in capfd.readouterr().err


def with_command(monkeypatch, problem: BaseException) -> None:
    """A command `version` that raises."""
    @click.command()
    def broken() -> None:
        raise problem

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: broken)


@pytest.mark.parametrize("problem, code", [
    (FileFormatError("m.q27: cut.", "Download it again."), 3), (UsageError("no."), 2), (KeyboardInterrupt(), 130),
    (BrokenPipeError(), 1), (RuntimeError("surprise"), 70),
])
def test_each_kind_of_error_has_its_exit_code(monkeypatch, problem, code):
    monkeypatch.setattr(cli, "_silence", lambda stream: None)  # else the test's own standard output would go
    with_command(monkeypatch, problem)
    try:
        assert run(["version"]) == code
    except SystemExit as left:  # click leaves by itself when a pipe breaks
        assert left.code == code


def test_a_hint_follows_its_message(monkeypatch, capfd):
    with_command(monkeypatch, FileFormatError("m.q27: cut.", "Download it again."))
    run(["version"])
    assert capfd.readouterr().err == "error: m.q27: cut.\n  Download it again.\n"


def test_an_internal_error_is_one_line_and_a_log_entry(monkeypatch, capfd):
    with_command(monkeypatch, RuntimeError("surprise"))
    assert run(["version"]) == 70
    err = capfd.readouterr().err
    assert "surprise" in err and "Traceback" not in err
    log = (paths.state_dir() / "errors.log").read_text()
    assert "RuntimeError: surprise" in log and "Traceback" in log


def test_a_closed_pipe_is_quiet():
    program = start("config", "show")
    program.stdout.close()
    program.stdin.close()
    assert program.stderr.read() == b""
    program.wait(120)


def test_config_show_hides_keys(monkeypatch, capfd):
    monkeypatch.setenv("Q27APP_SERVER__API_KEYS", "topsecret")
    assert run(["config", "show", "--origin"]) == 0
    text = capfd.readouterr().out
    assert "topsecret" not in text
    assert 'api_keys = ["***"]' in text and "environment Q27APP_SERVER__API_KEYS" in text


def test_config_show_as_json_names_origins(capfd):
    assert run(["config", "show", "--json", "--origin"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["server"]["port"] == {"value": 8027, "origin": "default", "where": "default"}


def test_config_path_is_printed(capfd):
    assert run(["config", "path"]) == 0
    assert capfd.readouterr().out.strip() == str(paths.config_dir() / "config.toml")


def test_the_demo_is_listed(capfd):
    assert run(["list", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["name"] == "demo"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capfd):
    assert run([name, "--help"]) == 0
    assert capfd.readouterr().out.startswith(f"Usage: q27app {name}")


def test_tokens_there_and_back():
    text = "naïve <|im_end|> text\n\twith {\"json\": [1, 2]}\n"
    code, out, _ = finish("tokens", "encode", "--model", "demo", given=text.encode())
    assert code == 0
    code, back, _ = finish("tokens", "decode", "--model", "demo", given=out.encode())
    assert (code, back) == (0, text)


def test_control_tokens_are_text_unless_asked_for():
    plain = json.loads(finish("tokens", "encode", "--json", given=b"<|im_end|>")[1])
    control = json.loads(finish("tokens", "encode", "--json", "--control", given=b"<|im_end|>")[1])
    assert control["count"] == 1 < plain["count"]
    again = json.loads(finish("tokens", "decode", "--json", given=json.dumps(control).encode())[1])
    assert again["text"] == "<|im_end|>"


def test_tokens_from_a_gguf_equal_the_reference(shared):
    texts = (shared / "vocab/qwen35-vocab.inp").read_text().split("\n__ggml_vocab_test__\n")
    ids = (shared / "vocab/qwen35-vocab.out").read_text().splitlines()
    code, out, _ = finish("tokens", "encode", "-m", str(shared / "vocab/qwen35-vocab.gguf"), given=texts[0].encode())
    assert code == 0
    assert out.strip().split(",") == ids[0].split()


def test_bytes_that_are_no_text_are_refused():
    code, _, err = finish("tokens", "encode", given=b"ok \xff")
    assert code == 2
    assert "byte 3 is 0xff" in err


def test_an_id_outside_the_vocabulary_is_refused():
    code, _, err = finish("tokens", "decode", given=b"1,99999999")
    assert code == 2
    assert "99999999" in err


@pytest.mark.parametrize("text, ids", [("1,2,3", [1, 2, 3]), ("[1, 2]\n3", [1, 2, 3]), ("", []), (" 7 ", [7])])
def test_ids_are_read_in_every_common_spelling(text, ids):
    assert parse_ids(text, "here") == ids


@pytest.mark.parametrize("text", ["1,-2", "x", "1.5", "9999999999", "٣"])
def test_what_is_no_id_is_named(text):
    with pytest.raises(UsageError, match="not a token id"):
        parse_ids(text, "here")


def test_synth_inspect_and_convert_refuse_to_overwrite(tmp_path, capfd):
    target = str(tmp_path / "nano.q27")
    assert run(["synth", target]) == 0
    assert run(["inspect", target, "--json"]) == 0
    described = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert described["model"]["tier"] == "q4s"
    assert run(["synth", target]) == 2
    assert run(["synth", target, "--overwrite", "--wiring", "dense"]) == 0


def test_convert_reports_the_worst_tensors(shared, tmp_path, capfd):
    source = str(shared / "oracle/golden/small-r3.gguf")
    assert run(["convert", source, str(tmp_path / "a.q27"), "--tier", "f16"]) == 0
    captured = capfd.readouterr()
    assert "Worst tensors" in captured.out
    assert "/s" in captured.err
    assert run(["convert", source, str(tmp_path / "b.q27"), "--tier", "f32", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tier"] == "f32"


def test_progress_away_from_a_terminal_prints_each_tenth_once(capfd):
    progress = Progress("copied")
    for done in range(0, 101, 2):
        progress(done, 100, "x")
    progress.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1].startswith("copied 100 B of 100 B")


def test_bytes_are_printed_in_powers_of_1000():
    assert [human_bytes(n) for n in (999, 1500, 2_500_000, 15.46e9)] == ["999 B", "1.50 kB", "2.50 MB", "15.46 GB"]


def test_a_file_is_named_once_and_without_the_systems_number(tmp_path, capfd):
    for arguments in (["serve", "--api-key-file", str(tmp_path / "none")], ["bench", "plot", str(tmp_path / "none"), "x.png"]):
        assert run(arguments) == 2
        err = capfd.readouterr().err
        assert err.count(str(tmp_path / "none")) == 1 and "Errno" not in err and "No such file or directory" in err


def test_a_setting_that_may_be_empty_says_so(capfd):
    assert run(["serve", "--preset", "x"]) == 2
    assert 'Allowed: "", agentic' in capfd.readouterr().err


@pytest.mark.parametrize("body, doubts", [("Bad Gateway", True), ("{}", True), ('{"error": {"message": "a mistake of ours"}}', False),
                                          ('{"reason": "the model is loading."}', False)])
def test_a_server_that_says_what_is_wrong_is_not_taken_for_another(body, doubts):
    from q27app.client import _refusal

    for status in (500, 502, 503):
        error = _refusal(status, body, "GET http://a/x")
        assert ("Is the address right" in error.hint) is doubts
        assert (error.message == f"GET http://a/x was answered with status {status}.") is doubts and (doubts or error.message in body)
