"""The draft layer at the precision of the main layers."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from q27app.engine import loading
from q27app.errors import FileFormatError, OutOfMemory
from q27app.weights import light
from q27app.weights.codecs import encode
from q27app.weights.container import open_container
from q27app.weights.dtypes import Q4_G64
from q27app.weights.light import with_light_drafts
from q27app.weights.synthetic import synthesize


@pytest.mark.parametrize("wiring", ["dense", "chain"])
def test_a_q4_models_draft_layer_becomes_q4(tmp_path, wiring):
    with open_container(synthesize(tmp_path / "a.q27", "nano", wiring, "q4s")) as container:
        draft = max(int(name.split(".")[1]) for name in container.tensors if name.startswith("blk."))
        lighter = with_light_drafts(container, draft)
        changed = {name for name, tensor in lighter.tensors.items() if tensor is not container.tensors[name]}
        assert changed == {f"blk.{draft}.{name}.weight" for name in
                           ("nextn.eh_proj", "attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
        assert list(lighter.tensors) == list(container.tensors)
        for name in changed:
            old, new = container.tensors[name], lighter.tensors[name]
            data, scales = encode(old.values(), Q4_G64)
            assert new.dtype is Q4_G64 and new.shape == old.shape
            np.testing.assert_array_equal(new.data, data)
            np.testing.assert_array_equal(new.scales, scales)


def at_work() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("q27app-light")]


@pytest.mark.parametrize("ends", ["load", "memory"])
def test_nobody_requantises_for_a_load_that_has_failed(tmp_path, monkeypatch, ends):
    begun, inner, empty = [], light.encode, np.empty

    def slow(values, dtype, name, threads):
        begun.append(name)
        time.sleep(0.05)
        return inner(values, dtype, name, threads=threads)

    def refuses(*args):
        if begun:
            raise MemoryError("Unable to allocate 90 MiB")
        return empty(*args)

    def fails(backend, container, *rest, **options):
        assert container.tensors["blk.4.ffn_down.weight"].dtype is Q4_G64 and at_work()
        raise OutOfMemory("it does not fit.")

    monkeypatch.setattr(light, "encode", slow)
    monkeypatch.setattr(light, "ROWS", 8)
    monkeypatch.setattr(light, "MAX_THREADS", 2)
    monkeypatch.setattr(loading, "_light", lambda config, backend, container, geometry: with_light_drafts(container, geometry.num_layers))
    monkeypatch.setattr("q27app.model.forward.load_model", fails)
    if ends == "memory":
        monkeypatch.setattr(light.np, "empty", refuses)
    path = synthesize(tmp_path / "a.q27", "nano", "dense", "q4s")
    with pytest.raises(OutOfMemory if ends == "load" else MemoryError):
        loading.open_model(loading.EngineConfig(path, "numpy"), lambda share: None)
    assert not at_work() and 0 < len(begun) < 20, "what had been begun was waited for"


def test_other_models_stay_as_they_are(tmp_path):
    with open_container(synthesize(tmp_path / "a.q27", "nano", "dense", "q8")) as container:
        assert with_light_drafts(container, 4) is container


def test_who_wants_a_matrix_waits_and_gets_what_ended_it(tmp_path, monkeypatch):
    go_on, inner = threading.Event(), light.encode

    def waits(values, dtype, name, threads):
        go_on.wait(20)
        if "ffn_up" in name:
            raise FileFormatError("a scale is not finite.")
        return inner(values, dtype, name, threads=threads)

    monkeypatch.setattr(light, "encode", waits)
    with open_container(synthesize(tmp_path / "a.q27", "nano", "dense", "q4s")) as container:
        draft = max(int(name.split(".")[1]) for name in container.tensors if name.startswith("blk."))
        found = with_light_drafts(container, draft).tensors
        down, up = (found[f"blk.{draft}.ffn_{name}.weight"] for name in ("down", "up"))
        assert down.dtype is Q4_G64 and down.nbytes < container.tensors[down.name].nbytes and down.rows == down.shape[0]
        threading.Timer(0.1, go_on.set).start()
        np.testing.assert_array_equal(down.scales, encode(container.tensors[down.name].values(), Q4_G64)[1])
        values = down.values()
        assert values.shape == down.shape and abs(values - container.tensors[down.name].values()).max() < 0.1
        with pytest.raises(FileFormatError, match="not finite"):
            up.data
        assert list(found) == list(container.tensors)
