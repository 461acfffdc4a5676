"""The memory plan: published byte counts, monotone in memory, never above what is free."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.errors import OutOfMemory, UsageError
from q27app.model.budget import (
    automatic_kv_formats, block_bytes, place_embedding, plan_memory, plan_with_best_format, slot_bytes, with_shared_slots,
)
from tests.model import geometry


CONFIG = geometry.config_27b()
GB = 10**9


def plan(free, **wishes):
    return plan_memory(CONFIG, free=free, weights=int(13.9 * GB), scratch=GB // 2, kv_format="fp16", margin=GB, **wishes)


def test_bytes_of_the_27b_are_the_published_ones():
    assert block_bytes(CONFIG, "fp16") == 64 * 69632
    assert block_bytes(CONFIG, "fp8") == 64 * 34816
    assert slot_bytes(CONFIG) == 48 * (3145728 + 122880) + 4 * 5120
    assert slot_bytes(CONFIG, 4) == slot_bytes(CONFIG) + 48 * 40960
    assert slot_bytes(CONFIG, lacking_rows=3) == slot_bytes(CONFIG) + 48 * 4 * (3 * 8192 + 4 * 96)


def test_auto_context_stops_at_the_native_window():
    assert plan(141 * GB).max_context == 262144


def test_a_small_card_gets_the_largest_multiple_of_the_step():
    got = plan(24 * GB)
    assert got.max_context % 1024 == 0 and 2048 <= got.max_context < 262144
    with pytest.raises(OutOfMemory):
        plan(24 * GB, context=got.max_context + 2048)


@settings(max_examples=60, deadline=None)
@given(st.integers(16 * GB, 150 * GB), st.integers(1, 8))
def test_a_plan_never_exceeds_what_is_free(free, slots):
    try:
        got = plan(free, slots=slots)
    except OutOfMemory:
        return
    assert got.used + got.margin <= free
    assert got.num_blocks * 64 >= got.num_slots * got.max_context


@settings(max_examples=60, deadline=None)
@given(st.integers(18 * GB, 150 * GB), st.integers(0, 20 * GB))
def test_more_memory_never_gives_less_context(free, more):
    assert plan(free + more).max_context >= plan(free).max_context


def test_a_wish_that_does_not_fit_names_the_largest_that_does():
    with pytest.raises(OutOfMemory, match="largest context that fits is [0-9]+ tokens"):
        plan(24 * GB, context=262144)


def test_a_window_beyond_the_native_one_is_allowed_with_a_warning():
    got = plan(141 * GB, context=655360)
    assert got.max_context == 655360
    assert any("beyond the native window" in reason for reason in got.reasons)


@pytest.mark.parametrize("wishes", [{"context": 0}, {"slots": 0}, {"slots": 10**6}])
def test_senseless_wishes_are_usage_errors(wishes):
    with pytest.raises(UsageError):
        plan(24 * GB, **wishes)


@pytest.mark.parametrize("free, capability, expected", [
    (140 * GB, (9, 0), ("fp16", 262_144)), (30 * GB, (12, 0), ("fp8", 262_144)), (24 * GB, (8, 9), ("turbo5k", 262_144)),
    (24 * GB, (8, 6), ("turbo5k", 262_144)), (19 * GB, (8, 6), ("turbo5k", None))])
def test_the_format_is_the_most_exact_that_holds_the_window(free, capability, expected):
    formats = automatic_kv_formats(capability, CONFIG.head_dim)
    got = plan_with_best_format(CONFIG, formats, free=free, weights=int(15.5 * GB), scratch=GB // 2, margin=GB)
    assert got.kv_format == expected[0] and (got.max_context == expected[1] or expected[1] is None)
    assert got.reasons[0].startswith(f"KV format: {expected[0]} (auto: ")
    wished = plan_with_best_format(CONFIG, formats, free=free, weights=int(15.5 * GB), scratch=GB // 2, margin=GB, context=4096)
    assert wished.kv_format == "fp16"


def test_no_format_fits_and_none_is_there():
    with pytest.raises(OutOfMemory):
        plan_with_best_format(CONFIG, ["fp16", "turbo3"], free=16 * GB, weights=int(15.5 * GB), scratch=GB // 2)
    assert automatic_kv_formats(None, 256) == ["fp32"] and automatic_kv_formats((8, 6), 64) == ["fp16"]


def test_the_embedding_is_placed_where_it_buys_window():
    def at(free):
        return lambda weights: plan_memory(CONFIG, free=free, weights=weights, scratch=GB // 2, kv_format="fp8")

    weights, table = int(15.5 * GB), int(1.29 * GB)
    big, in_host = place_embedding(at(60 * GB), weights, table, "auto", 262_144)
    assert not in_host and big.weights == weights
    small, in_host = place_embedding(at(20 * GB), weights, table, "auto", 262_144)
    assert in_host and small.weights == weights - table and small.reasons[-1].startswith("embedding: in host memory")
    assert not place_embedding(at(20 * GB), weights, table, "device", 262_144)[1]
    assert not place_embedding(at(20 * GB), weights, 0, "host", 262_144)[1]
    assert place_embedding(at(60 * GB), weights, table, "host", 262_144)[1]
    with pytest.raises(OutOfMemory):
        place_embedding(at(14 * GB), weights, table, "auto", 262_144)


def test_slots_that_share_the_blocks_take_half_of_what_is_left():
    got = plan(141 * GB, max_auto_slots=4)
    more = with_shared_slots(got, 16)
    assert (got.num_slots, more.num_slots, more.num_blocks) == (4, 16, got.num_blocks) and more.used + more.margin <= more.free
    assert "16 in all" in more.reasons[-1]
    left = got.free - got.margin - got.used
    tight = replace(got, free=got.free - left + 5 * got.slot_bytes)
    assert with_shared_slots(tight, 16).num_slots == 4 + 2 and with_shared_slots(tight, 4) is tight
