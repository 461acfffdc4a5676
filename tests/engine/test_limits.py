"""What a request may ask for, and its prompt as an array."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.engine import request as request_module
from q27app.engine.limits import check_request
from q27app.engine.request import Request, SamplingParams
from q27app.errors import BadRequest, ContextTooLong


def asked(prompt: tuple[int, ...], max_tokens: int = 5) -> int:
    return check_request(Request("r", prompt, SamplingParams(max_tokens=max_tokens)), 100, 20)


@pytest.mark.parametrize("odd", [-1, 100, 1 << 31, 1 << 80, -(1 << 40)])
def test_ids_outside_of_the_vocabulary_are_refused_with_their_range(odd):
    with pytest.raises(BadRequest, match=f"token ids from {min(odd, 3)} to {max(odd, 7)}, expected 0 to 99"):
        asked((3, 7, odd, 5))
    assert asked((0, 99, 5)) == 5


def test_the_window_bounds_prompt_and_answer():
    assert asked((1,) * 19, 50) == 1 and asked((1,) * 20, 0) == 0
    with pytest.raises(ContextTooLong):
        asked((1,) * 20)
    with pytest.raises(BadRequest, match="empty"):
        asked(())


def test_a_prompt_is_an_array_once_and_for_all():
    request = Request("r", (3, 7, 5))
    ids = request.prompt_ids
    assert ids.dtype == np.int32 and ids.tolist() == [3, 7, 5] and request.prompt_ids is ids and Request("r", ()).prompt_ids.shape == (0,)
    with pytest.raises(ValueError):
        ids[0] = 1


def test_a_prompt_is_checked_where_no_memory_is_left_for_its_array(monkeypatch):
    def ends(*_):
        raise MemoryError("Unable to allocate 1 MiB")

    monkeypatch.setattr(request_module, "array", ends)
    assert asked((3, 99)) == 5
    with pytest.raises(BadRequest, match="from 3 to 100"):
        asked((3, 100))
