"""Tiers: every tensor kind's format in each tier and generation, and the published counts and sizes of the 27B."""

from __future__ import annotations

from collections import Counter

import pytest

from q27app.errors import FileFormatError, UsageError
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128
from q27app.weights.tiers import QUANTISED_TIERS, TIER_NAMES, tier_entries
from q27app.weights.writer import TensorEntry, data_section_bytes

FORMATS = {"F32": F32, "F16": F16, "Q8": Q8_G128, "Q4": Q4_G64}

# Formats that no tier changes.
FIXED = {
    "token_embd.weight": "Q8",
    "output_norm.weight": "F32",
    "blk.0.attn_norm.weight": "F32",
    "blk.0.post_attention_norm.weight": "F32",
    "blk.3.attn_q.weight": "Q4",
    "blk.3.attn_k.weight": "Q8",
    "blk.3.attn_v.weight": "Q8",
    "blk.3.attn_q_norm.weight": "F32",
    "blk.3.attn_k_norm.weight": "F32",
    "blk.0.attn_qkv.weight": "Q4",
    "blk.0.attn_gate.weight": "Q4",
    "blk.0.ssm_alpha.weight": "F16",
    "blk.0.ssm_beta.weight": "F16",
    "blk.0.ssm_a": "F32",
    "blk.0.ssm_dt.bias": "F32",
    "blk.0.ssm_conv1d.weight": "F32",
    "blk.0.ssm_norm.weight": "F32",
    "blk.64.attn_norm.weight": "F32",
    "blk.64.post_attention_norm.weight": "F32",
    "blk.64.attn_q.weight": "Q8",
    "blk.64.attn_k.weight": "Q8",
    "blk.64.attn_v.weight": "Q8",
    "blk.64.attn_output.weight": "Q8",
    "blk.64.attn_q_norm.weight": "F32",
    "blk.64.attn_k_norm.weight": "F32",
    "blk.64.ffn_gate.weight": "Q8",
    "blk.64.ffn_up.weight": "Q8",
    "blk.64.ffn_down.weight": "Q8",
    "blk.64.nextn.eh_proj.weight": "Q8",
    "blk.64.nextn.enorm.weight": "F32",
    "blk.64.nextn.hnorm.weight": "F32",
    "blk.64.nextn.shared_head_norm.weight": "F32",
}
ATTENTION_8 = {"blk.3.attn_q.weight": "Q8", "blk.0.attn_qkv.weight": "Q8", "blk.0.attn_gate.weight": "Q8"}

# generation, tier: output.weight, output_q4.weight, attn_output, ssm_out, ffn_gate, ffn_up, ffn_down, other matrices
VARYING = {
    ("3.6", "default"): ("Q8", "Q4", "Q8", "Q8", "Q4", "Q4", "Q4", "Q4"),
    ("3.6", "q4s"): ("Q4", None, "Q4", "Q4", "Q4", "Q4", "Q4", "Q4"),
    ("3.6", "q5f"): ("Q4", None, "Q4", "Q4", "Q4", "Q4", "Q8", "Q4"),
    ("3.6", "q6"): ("Q8", "Q4", "Q8", "Q8", "Q4", "Q4", "Q8", "Q4"),
    ("3.6", "q6f"): ("Q4", None, "Q4", "Q4", "Q8", "Q4", "Q8", "Q4"),
    ("3.6", "q6k"): ("Q8", "Q4", "Q8", "Q8", "Q8", "Q4", "Q8", "Q4"),
    ("3.6", "q8"): ("Q8", "Q4", "Q8", "Q8", "Q8", "Q8", "Q8", "Q8"),
    ("3.8", "default"): ("Q8", "Q4", "Q8", "Q4", "Q4", "Q4", "Q4", "Q4"),
    ("3.8", "q4s"): ("Q4", None, "Q8", "Q4", "Q4", "Q4", "Q4", "Q4"),
    ("3.8", "q5f"): ("Q4", None, "Q4", "Q4", "Q4", "Q4", "Q8", "Q4"),
    ("3.8", "q6"): ("Q8", "Q4", "Q8", "Q4", "Q4", "Q4", "Q8", "Q4"),
    ("3.8", "q6f"): ("Q4", None, "Q4", "Q4", "Q8", "Q4", "Q8", "Q4"),
    ("3.8", "q6k"): ("Q8", "Q4", "Q8", "Q4", "Q4", "Q8", "Q8", "Q4"),
    ("3.8", "q8"): ("Q8", "Q4", "Q8", "Q8", "Q8", "Q8", "Q8", "Q8"),
}
VARYING_NAMES = (
    "output.weight",
    "output_q4.weight",
    "blk.3.attn_output.weight",
    "blk.0.ssm_out.weight",
    "blk.0.ffn_gate.weight",
    "blk.0.ffn_up.weight",
    "blk.0.ffn_down.weight",
)

HIDDEN, FFN, VOCAB = 5120, 17408, 248320
BLOCK = {
    "attn_norm.weight": (HIDDEN,),
    "post_attention_norm.weight": (HIDDEN,),
    "ffn_gate.weight": (FFN, HIDDEN),
    "ffn_up.weight": (FFN, HIDDEN),
    "ffn_down.weight": (HIDDEN, FFN),
}
ATTENTION = {
    "attn_q.weight": (12288, HIDDEN),
    "attn_k.weight": (1024, HIDDEN),
    "attn_v.weight": (1024, HIDDEN),
    "attn_output.weight": (HIDDEN, 6144),
    "attn_q_norm.weight": (256,),
    "attn_k_norm.weight": (256,),
}
DELTA = {
    "attn_qkv.weight": (10240, HIDDEN),
    "attn_gate.weight": (6144, HIDDEN),
    "ssm_out.weight": (HIDDEN, 6144),
    "ssm_alpha.weight": (48, HIDDEN),
    "ssm_beta.weight": (48, HIDDEN),
    "ssm_a": (48,),
    "ssm_dt.bias": (48,),
    "ssm_conv1d.weight": (10240, 4),
    "ssm_norm.weight": (128,),
}
NEXTN = {
    "nextn.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "nextn.enorm.weight": (HIDDEN,),
    "nextn.hnorm.weight": (HIDDEN,),
    "nextn.shared_head_norm.weight": (HIDDEN,),
}


def shapes_27b(num_layers: int = 64, tied: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for index in range(num_layers + 1):
        mixer = ATTENTION if index % 4 == 3 or index == num_layers else DELTA
        block = {**BLOCK, **mixer, **(NEXTN if index == num_layers else {})}
        shapes.update({f"blk.{index}.{name}": shape for name, shape in block.items()})
    return shapes


def entries_27b(tier: str, generation: str) -> list[TensorEntry]:
    shapes = shapes_27b()
    plan = tier_entries(tier, generation, shapes, 64)
    shapes["output_q4.weight"] = shapes["output.weight"]
    return [TensorEntry(name, dtype, shapes[name]) for name, dtype in plan.dtypes.items()]


def expected_names(plan_row: tuple[str | None, ...]) -> dict[str, str]:
    expected = {**FIXED, **{name: dtype for name, dtype in zip(VARYING_NAMES, plan_row) if dtype}}
    return {**expected, **ATTENTION_8} if plan_row[-1] == "Q8" else expected


@pytest.mark.parametrize(("generation", "tier"), sorted(VARYING))
def test_each_tensor_kind_has_its_format(generation, tier):
    plan = tier_entries(tier, generation, shapes_27b(), 64)
    expected = {name: FORMATS[short] for name, short in expected_names(VARYING[generation, tier]).items()}
    assert {name: plan.dtypes.get(name) for name in expected} == expected
    assert ("output_q4.weight" in plan.dtypes) == ("output_q4.weight" in expected)


@pytest.mark.parametrize(("generation", "tier"), sorted(VARYING))
def test_layers_of_one_kind_are_alike(generation, tier):
    plan = tier_entries(tier, generation, shapes_27b(), 64)
    kinds: dict[str, set] = {}
    for name, dtype in plan.dtypes.items():
        if name.startswith("blk.") and not name.startswith("blk.64."):
            kinds.setdefault(name.split(".", 2)[2], set()).add(dtype)
    assert all(len(dtypes) == 1 for dtypes in kinds.values())


def test_the_published_counts_of_q4s():
    counts = Counter(entry.dtype.name for entry in entries_27b("q4s", "3.6"))
    assert counts == {"Q4_G64": 369, "Q8_G128": 41, "F16": 96, "F32": 360}


def test_one_head_gives_866_tensors_and_two_heads_867():
    assert {tier: len(entries_27b(tier, "3.6")) for tier in QUANTISED_TIERS} == {
        "default": 867,
        "q4s": 866,
        "q5f": 866,
        "q6": 867,
        "q6f": 866,
        "q6k": 867,
        "q8": 867,
    }


# Published file sizes in GB, to the last printed digit; the metadata, some MB, is not in the sum.
PUBLISHED_GB = {
    ("3.6", "q4s"): 15.46,
    ("3.6", "default"): 17.73,
    ("3.6", "q5f"): 18.22,
    ("3.6", "q6"): 20.49,
    ("3.6", "q6f"): 20.99,
    ("3.6", "q6k"): 23.25,
    ("3.6", "q8"): 28.45,
    ("3.8", "q4s"): 15.70,
    ("3.8", "default"): 17.00,
    ("3.8", "q6"): 19.76,
    ("3.8", "q6k"): 22.52,
}


@pytest.mark.parametrize(("generation", "tier"), sorted(PUBLISHED_GB))
def test_file_sizes_equal_the_published_ones(generation, tier):
    size = data_section_bytes(entries_27b(tier, generation)) / 1e9
    assert size == pytest.approx(PUBLISHED_GB[generation, tier], abs=0.006)


@pytest.mark.parametrize("tier", QUANTISED_TIERS)
def test_tied_embeddings_are_the_head_at_q8(tier):
    plan = tier_entries(tier, "3.6", shapes_27b(tied=True), 64)
    assert plan.dtypes["token_embd.weight"] is Q8_G128
    assert "output.weight" not in plan.dtypes


def test_a_tier_with_two_heads_copies_the_tied_embedding_for_drafts():
    plan = tier_entries("default", "3.6", shapes_27b(tied=True), 64)
    assert (plan.draft_head_source, plan.dtypes["output_q4.weight"]) == ("token_embd.weight", Q4_G64)


def test_a_tier_with_one_head_makes_no_copy_of_the_tied_embedding():
    plan = tier_entries("q4s", "3.6", shapes_27b(tied=True), 64)
    assert plan.draft_head_source is None and "output_q4.weight" not in plan.dtypes


def test_an_untied_copy_comes_from_the_head():
    assert tier_entries("q6", "3.8", shapes_27b(), 64).draft_head_source == "output.weight"


def test_the_mtp_block_is_found_by_its_own_index():
    shapes = shapes_27b(num_layers=24)
    plan = tier_entries("q4s", "3.6", shapes, 24)
    assert plan.dtypes["blk.24.ffn_down.weight"] is Q8_G128
    assert plan.dtypes["blk.2.ffn_down.weight"] is Q4_G64


def test_block_64_of_a_deeper_model_is_an_ordinary_block():
    assert tier_entries("q4s", "3.6", ["blk.64.ffn_down.weight"], 80).dtypes["blk.64.ffn_down.weight"] is Q4_G64


def test_a_block_whose_number_begins_with_the_mtp_index_is_an_ordinary_block():
    assert tier_entries("q4s", "3.6", ["blk.10.ffn_up.weight"], 1).dtypes["blk.10.ffn_up.weight"] is Q4_G64


def test_a_model_without_mtp_has_no_promoted_block():
    assert tier_entries("q4s", "3.6", ["blk.64.ffn_down.weight"], None).dtypes["blk.64.ffn_down.weight"] is Q4_G64


@pytest.mark.parametrize(("tier", "dtype"), [("f32", F32), ("f16", F16)])
def test_the_test_tiers_keep_every_matrix_unquantised(tier, dtype):
    shapes = shapes_27b(num_layers=4)
    plan = tier_entries(tier, "3.6", shapes, 4)
    matrices = {name for name, shape in shapes.items() if len(shape) == 2 and "ssm_conv1d" not in name}
    assert {plan.dtypes[name] for name in matrices} == {dtype}
    assert {plan.dtypes[name] for name in shapes if name not in matrices} == {F32}
    assert "output_q4.weight" not in plan.dtypes


def test_columns_that_a_group_does_not_divide_are_refused_by_name():
    shapes = {"token_embd.weight": (512, 128), "blk.0.ffn_down.weight": (128, 96)}
    with pytest.raises(FileFormatError, match=r"blk\.0\.ffn_down\.weight \[128, 96\].*groups of 64; 96 columns"):
        tier_entries("q4s", "3.6", shapes, None)


def test_a_vector_in_a_grouped_format_is_refused_by_name():
    with pytest.raises(FileFormatError, match=r"blk\.0\.strange\.weight.*expected \[rows, cols\]"):
        tier_entries("q8", "3.6", {"blk.0.strange.weight": (128,)}, None)


@pytest.mark.parametrize(("tier", "generation"), [("q9", "3.6"), ("q4s", "3.7")])
def test_unknown_tiers_and_generations_are_refused_with_the_known_ones(tier, generation):
    with pytest.raises(UsageError, match="expected one of .*(q6k|3.8)"):
        tier_entries(tier, generation, [], None)


def test_the_names_are_seven_tiers_and_two_for_tests():
    assert TIER_NAMES == ("default", "q4s", "q5f", "q6", "q6f", "q6k", "q8", "f32", "f16")
