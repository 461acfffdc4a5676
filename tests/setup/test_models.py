"""Downloads against a hub that misbehaves; importing, showing and removing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from q27app import cli
from q27app.cli_models import import_model, rm, show
from q27app.errors import FileFormatError, NotFound, Unreachable, UsageError
from q27app.paths import demo_model, models_dir
from q27app.setup import download as downloading, models
from q27app.setup.download import Remote, download
from q27app.setup.models import Source, find_source, pull
from tests.setup.hub_double import HubDouble

DATA = random.Random(1).randbytes(300_000)
QUICK = {"pause_s": 0.01, "keep_free": 0}


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants as constants
    import huggingface_hub.file_download as file_download
    import huggingface_hub.hf_api as hf_api

    double = HubDouble({"m.q27": DATA})
    monkeypatch.setattr(constants, "ENDPOINT", double.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", double.url + "/{repo_id}/resolve/{revision}/{filename}")
    for module in (file_download, hf_api):
        if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", constants.HUGGINGFACE_CO_URL_TEMPLATE)
    yield double
    double.close()


def fetch(hub, **options):
    return pull(Source("o/r", "m.q27"), **(QUICK | options))[0]


def test_a_file_arrives_whole_and_alone(hub):
    seen = []
    path = fetch(hub, progress=lambda done, total, name: seen.append((done, total, name)))
    assert path == models_dir() / "m.q27" and path.read_bytes() == DATA
    assert seen[-1] == (len(DATA), len(DATA), "m.q27")
    assert sorted(entry.name for entry in models_dir().iterdir()) == ["m.q27", "m.q27.lock"]
    hub.ranges.clear()
    fetch(hub)
    assert hub.ranges == []


@pytest.mark.parametrize("fault", ["truncate", "stall"])
def test_what_breaks_off_goes_on_where_it_stopped(hub, fault):
    hub.faults = [fault]
    assert fetch(hub, **({"stall_s": 3.0} if fault == "stall" else {})).read_bytes() == DATA
    assert hub.ranges == [None, f"bytes={len(DATA) // 2}-"]


def test_a_range_that_the_server_lacks_starts_anew(hub):
    hub.faults = ["truncate", 416]
    assert fetch(hub).read_bytes() == DATA
    assert hub.ranges == [None, None]


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_asked_again(hub, code):
    hub.faults = [code, code]
    assert fetch(hub).read_bytes() == DATA


def test_a_file_that_changes_is_fetched_anew(hub):
    hub.faults = ["truncate", "change"]
    assert fetch(hub).read_bytes() == DATA[::-1]
    assert hub.ranges[-1] is None


def test_a_wrong_checksum_leaves_nothing_behind(hub):
    hub.etags["m.q27"] = "0" * 64
    with pytest.raises(FileFormatError, match="sha256 of what arrived"):
        fetch(hub)
    assert not list(models_dir().glob("m.q27.part*")) and not (models_dir() / "m.q27").exists()
    hub.etags["m.q27"] = hashlib.md5(DATA).hexdigest()
    assert fetch(hub).read_bytes() == DATA


def test_endless_trouble_ends(hub):
    hub.faults = [503] * 20
    with pytest.raises(Unreachable, match="3 attempts in a row"):
        fetch(hub, attempts=3)


def test_a_full_disk_is_told_before_the_first_byte(hub):
    with pytest.raises(UsageError, match="GB are free"):
        fetch(hub, keep_free=1 << 60)
    assert hub.ranges == []


def test_two_pulls_at_once_do_not_mix(hub, tmp_path):
    target = tmp_path / "x"
    with downloading._lock(target), pytest.raises(UsageError, match="another program"):
        download(lambda: Remote("", 0, ""), target)


def test_a_repository_is_searched_for_its_model(hub):
    assert pull(Source("o/r", None), **QUICK)[0].name == "m.q27"
    hub.files["n.q27"] = b"x"
    with pytest.raises(UsageError, match="holds 2 models"):
        pull(Source("o/r", None), **QUICK)


def test_a_tier_without_a_known_repository_is_refused_before_a_hub_is_asked(monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli.run(["pull", "q4s"]) == 2
    text = capsys.readouterr().err
    assert "knows no repository where tier q4s of Qwen3.6-27B is published" in text
    assert '["3.6/q4s=owner/repo:file.q27"]' in text and "q27app convert" in text


def test_a_file_that_the_hub_lacks_is_named(hub):
    with pytest.raises(NotFound):
        pull(Source("o/r", "absent.q27"), **QUICK)


def start_pull(hub):
    environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-m", "q27app", "pull", "o/r:m.q27"], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_pull_is_resumed_and_a_second_one_is_refused(hub):
    hub.faults = ["stall"]
    first = start_pull(hub)
    part = models_dir() / "m.q27.part"
    limit = time.monotonic() + 120
    while not (part.exists() and part.stat().st_size > 1000):
        assert time.monotonic() < limit and first.poll() is None
        time.sleep(0.01)
    with pytest.raises(UsageError, match="another program"):
        fetch(hub)
    first.kill()
    first.communicate()
    there = part.stat().st_size
    assert 0 < there < len(DATA) and not (models_dir() / "m.q27").exists()
    assert fetch(hub).read_bytes() == DATA
    assert hub.ranges == [None, f"bytes={there}-"]


def test_names_of_sources():
    assert find_source("q4s", "3.8", ["3.8/q4s=a/b:c.q27"]) == Source("a/b", "c.q27")
    assert find_source("a/b", "3.6") == Source("a/b", None)
    for bad in ("nothing", "a/../b", "a/b:../../x"):
        with pytest.raises(UsageError):
            find_source(bad, "3.6")
    with pytest.raises(UsageError, match="model.repos"):
        find_source("q4s", "3.6", ["junk"])


def test_a_model_is_imported_shown_and_removed(tmp_path):
    runner = CliRunner()
    source = tmp_path / "mine.q27"
    source.write_bytes(demo_model().read_bytes())
    assert "would link" in runner.invoke(import_model, [str(source), "--link", "--dry-run"]).stdout
    assert not models_dir().exists()
    assert runner.invoke(import_model, [str(source), "--link"]).exit_code == 0
    assert (models_dir() / "mine.q27").is_symlink()
    assert json.loads(runner.invoke(show, ["mine", "--json"]).stdout)["bytes"] == source.stat().st_size
    assert isinstance(runner.invoke(import_model, [str(source)]).exception, UsageError)
    assert runner.invoke(rm, ["mine"], input="n\n").exit_code == 1 and (models_dir() / "mine.q27").exists()
    assert runner.invoke(rm, ["mine", "--yes"]).exit_code == 0
    assert source.exists() and not (models_dir() / "mine.q27").is_symlink()
    assert runner.invoke(import_model, [str(source), "--move"]).exit_code == 0 and not source.exists()


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"PK\x03\x04")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "x", tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(UsageError):
            models.plan_import(path)
    (tmp_path / "bad.q27").write_bytes(demo_model().read_bytes()[:1000])
    with pytest.raises(FileFormatError):
        models.plan_import(tmp_path / "bad.q27")
