"""Precedence of the sources, and refusals that say where and what is allowed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q27app import config as config_module
from q27app import paths
from q27app.config import SECTIONS, load_config
from q27app.config_values import check_value, Rule
from q27app.errors import UsageError


@pytest.fixture
def config_file() -> Path:
    path = paths.config_dir() / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def test_defaults_need_no_file():
    config = load_config()
    assert (config.server.host, config.server.port, config.model.path) == ("127.0.0.1", 8027, "demo")
    assert str(config.origins["server.port"]) == "default"


def test_each_source_beats_the_one_below(config_file, monkeypatch):
    card = {"model.context": 4096}
    assert load_config(card=card).model.context == 4096
    config_file.write_text("[model]\ncontext = 8192\n")
    assert load_config(card=card).model.context == 8192
    monkeypatch.setenv("Q27APP_MODEL__CONTEXT", "16384")
    assert load_config(card=card).model.context == 16384
    assert load_config({"model.context": 32768}, card=card).model.context == 32768


def test_origin_names_file_line_variable_and_flag(config_file, monkeypatch):
    config_file.write_text("# mine\n[server]\nport = 9000\n")
    monkeypatch.setenv("Q27APP_LOG__LEVEL", "debug")
    origins = load_config({"model.context": "auto"}).origins
    assert str(origins["server.port"]) == f"file {config_file}:3"
    assert str(origins["log.level"]) == "environment Q27APP_LOG__LEVEL"
    assert str(origins["model.context"]) == "flag --ctx"


def test_a_flag_that_was_not_given_changes_nothing():
    assert load_config({"server.port": None}).server.port == 8027


@pytest.mark.parametrize("text, place, needle", [
    ("[server]\nprot = 1\n", ":2", "Keys: host, port"),
    ("[sever]\nport = 1\n", ":1", "Sections: server"),
    ("[sever]\n", ":1", "Sections: server"),
    ("port = 1\n", ":1", "Sections: server"),
    ("server = 1\n", ":1", "[server]"),
    ("[server]\n\nport = '80'\n", ":3", "a whole number from 0 to 65535"),
    ("[server]\nport = 70000\n", ":2", "from 0 to 65535"),
    ("[server]\nport = true\n", ":2", "a whole number"),
    ("[model]\nbackend = 'gpu'\n", ":2", "auto, cuda, numpy"),
    ("[model]\ncontext = 'big'\n", ":2", "or auto"),
    ("[server]\nallow_open_bind = 1\n", ":2", "true, false"),
    ("[server]\napi_keys = 'k'\n", ":2", "a list of strings"),
    ("[sampling]\ntemperature = nan\n", ":2", "a number from 0"),
    ("[server]\nport = = 1\n", ":2", "TOML"),
])
def test_a_bad_file_is_refused_with_its_line_and_what_is_allowed(config_file, text, place, needle):
    config_file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config()
    assert f"{config_file}{place}" in caught.value.message
    assert needle in str(caught.value)


def test_a_file_that_is_not_text_is_refused(config_file):
    config_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_config()


@pytest.mark.parametrize("name, value, needle", [
    ("Q27APP_SERVER__PORT", "http", "from 0 to 65535"),
    ("Q27APP_SERVER__PROT", "1", "Keys: host"),
    ("Q27APP_SEVER__PORT", "1", "Sections: server"),
    ("Q27APP_SERVER_PORT", "1", "two underscores"),
    ("Q27APP_SERVER__ALLOW_OPEN_BIND", "perhaps", "true, false"),
])
def test_a_bad_variable_is_refused_by_name(monkeypatch, name, value, needle):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        load_config()
    assert name in caught.value.message
    assert needle in str(caught.value)


def test_variables_carry_every_type(monkeypatch):
    for name, value in {"SERVER__API_KEYS": "a, b", "SERVER__ALLOW_OPEN_BIND": "off", "SAMPLING__TOP_P": "0.5",
                        "MODEL__SLOTS": "auto", "MODEL__CONTEXT": "4096", "MODEL__PATH": "x.q27"}.items():
        monkeypatch.setenv("Q27APP_" + name, value)
    config = load_config()
    assert config.server.api_keys == ("a", "b")
    assert config.server.allow_open_bind is False
    assert config.sampling.top_p == 0.5
    assert (config.model.slots, config.model.context, config.model.path) == ("auto", 4096, "x.q27")


def test_another_file_can_be_named(monkeypatch, tmp_path):
    (tmp_path / "mine.toml").write_text("[log]\nformat = 'json'\n")
    monkeypatch.setenv("Q27APP_CONFIG", str(tmp_path / "mine.toml"))
    assert load_config().log.format == "json"


def test_home_holds_every_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("Q27APP_HOME", str(tmp_path / "all"))
    folders = {paths.config_dir(), paths.data_dir(), paths.cache_dir(), paths.state_dir()}
    assert {folder.parent for folder in folders} == {tmp_path / "all"}


def test_a_model_is_found_by_path_name_and_demo(tmp_path):
    paths.ensured(paths.models_dir())
    (paths.models_dir() / "small.q27").write_bytes(b"")
    (tmp_path / "other.q27").write_bytes(b"")
    assert paths.resolve_model("small") == paths.models_dir() / "small.q27"
    assert paths.resolve_model("small.q27") == paths.models_dir() / "small.q27"
    assert paths.resolve_model(str(tmp_path / "other.q27")) == tmp_path / "other.q27"
    assert paths.resolve_model("demo") == paths.demo_model()
    with pytest.raises(UsageError, match="small"):
        paths.resolve_model("missing")


def test_every_field_of_every_section_has_a_doc_line():
    tree = ast.parse(Path(config_module.__file__).read_text())
    undocumented = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (node.name.endswith("Section") or node.name == "Config"):
            for statement, following in zip(node.body, node.body[1:] + [None], strict=True):
                is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if isinstance(statement, ast.AnnAssign) and not is_doc:
                    undocumented.append(f"{node.name}.{statement.target.id}")
    assert undocumented == []
    assert len(SECTIONS) == 8


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
       st.sampled_from(["bool", "int", "float", "str", "int | str", "tuple[str, ...]"]))
def test_any_value_is_accepted_as_its_type_or_refused(value, kind):
    try:
        checked = check_value(value, kind, Rule(low=0, high=10, words=("auto",)), "here")
    except UsageError as error:
        assert "Allowed" in error.hint
    else:
        types = {"bool": bool, "int": int, "float": float, "str": str, "int | str": (int, str), "tuple[str, ...]": tuple}
        assert isinstance(checked, types[kind])
