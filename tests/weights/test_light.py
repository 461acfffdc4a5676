"""The draft layer at the precision of the main layers."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.weights.codecs import encode
from q27app.weights.container import open_container
from q27app.weights.dtypes import Q4_G64
from q27app.weights.light import with_light_drafts
from q27app.weights.synthetic import synthesize


@pytest.mark.parametrize("wiring", ["dense", "chain"])
def test_a_q4_models_draft_layer_becomes_q4(tmp_path, wiring):
    with open_container(synthesize(tmp_path / "a.q27", "nano", wiring, "q4s")) as container:
        draft = max(int(name.split(".")[1]) for name in container.tensors if name.startswith("blk."))
        light = with_light_drafts(container, draft)
        changed = {name for name, tensor in light.tensors.items() if tensor is not container.tensors[name]}
        assert changed == {f"blk.{draft}.{name}.weight" for name in
                           ("nextn.eh_proj", "attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
        assert list(light.tensors) == list(container.tensors)
        for name in changed:
            old, new = container.tensors[name], light.tensors[name]
            data, scales = encode(old.values(), Q4_G64)
            assert new.dtype is Q4_G64 and new.shape == old.shape
            np.testing.assert_array_equal(new.data, data)
            np.testing.assert_array_equal(new.scales, scales)


def test_other_models_stay_as_they_are(tmp_path):
    with open_container(synthesize(tmp_path / "a.q27", "nano", "dense", "q8")) as container:
        assert with_light_drafts(container, 4) is container
