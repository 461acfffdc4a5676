"""Which tensor gets which format: seven tiers for two checkpoint generations, and two unquantised ones for tests.

The first line that matches a tensor's name decides (M is the MTP block's own index):

    1  ends with norm.weight, .ssm_a or .ssm_dt.bias, or holds ssm_conv1d      F32
    2  holds ssm_alpha or ssm_beta                                              F16
    3  output_q4.weight                                                         Q4_G64
    4  output.weight, in a tier with one head                                   Q4_G64
    5  token_embd.weight, output.weight, or below blk.M.                        Q8_G128
    6  blk.N.attn_k.weight, blk.N.attn_v.weight                                 Q8_G128
    7  ends with .weight and the tier's promotion is found in it                Q8_G128
    8  ends with .weight                                                        Q4_G64
    9  anything else                                                            F32

A tier with two heads stores `output_q4.weight`, a Q4 copy of the head for drafts. With tied embeddings there is no
`output.weight`: `token_embd.weight` at Q8 is the head too, a tier with two heads makes the copy from it, and a tier
with one head has only it.

Generation 3.8 has published recipes for q4s, default, q6 and q6k; its q5f and q6f take the promotions of 3.6, and q8
promotes everything in both. Tiers f32 and f16 keep lines 1 and 9 and store every other tensor unquantised, without a
copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from q27app.errors import FileFormatError, UsageError
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128, DType, row_bytes

GENERATIONS = ("3.6", "3.8")
QUANTISED_TIERS = ("default", "q4s", "q5f", "q6", "q6f", "q6k", "q8")
TIER_NAMES = (*QUANTISED_TIERS, "f32", "f16")

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
DRAFT_HEAD = "output_q4.weight"

_SMALL = re.compile(r"norm\.weight$|\.ssm_a$|\.ssm_dt\.bias$|ssm_conv1d")
_GATES = re.compile(r"ssm_alpha|ssm_beta")
_KEYS_VALUES = re.compile(r"^blk\.\d+\.attn_[kv]\.weight$")


@dataclass(frozen=True)
class Tier:
    """One row of the table.

    promotion: pattern of the names that Q8 takes from Q4, or None. one_head: the head is stored once, at Q4.
    unquantised: the format of every matrix, for the test tiers.
    """

    name: str
    promotion: str | None = None
    one_head: bool = False
    unquantised: DType | None = None

    @property
    def num_heads(self) -> int:
        """Stored heads, without tied embeddings."""
        return 1 if self.one_head or self.unquantised else 2


@dataclass(frozen=True)
class TierPlan:
    """The formats of a checkpoint's tensors.

    dtypes: by name, in the given order; `output_q4.weight`, where the tier makes one, comes last. draft_head_source:
    the tensor that `output_q4.weight` is a copy of, or None if there is no such copy to make.
    """

    tier: Tier
    dtypes: dict[str, DType]
    draft_head_source: str | None


_SHARED_ROWS = (
    Tier("q5f", r"ffn_down\.", one_head=True),
    Tier("q6f", r"(ffn_down|ffn_gate)\.", one_head=True),
    Tier("q8", r".*"),
    Tier("f32", unquantised=F32),
    Tier("f16", unquantised=F16),
)

_ROWS: dict[str, tuple[Tier, ...]] = {
    "3.6": (
        Tier("q4s", one_head=True),
        Tier("default", r"(ssm_out|attn_output)\."),
        Tier("q6", r"(ssm_out|attn_output|ffn_down)\."),
        Tier("q6k", r"(ssm_out|attn_output|ffn_down|ffn_gate)\."),
        *_SHARED_ROWS,
    ),
    "3.8": (
        Tier("q4s", r"attn_output\.", one_head=True),
        Tier("default", r"attn_output\."),
        Tier("q6", r"(attn_output|ffn_down)\."),
        Tier("q6k", r"(attn_output|ffn_down|ffn_up)\."),
        *_SHARED_ROWS,
    ),
}

TIERS = {(generation, tier.name): tier for generation, tiers in _ROWS.items() for tier in tiers}


def find_tier(name: str, generation: str) -> Tier:
    """UsageError for a tier or a generation that does not exist."""
    if generation not in GENERATIONS:
        raise UsageError(f"there is no generation {generation!r}; expected one of {', '.join(GENERATIONS)}.")
    if name not in TIER_NAMES:
        raise UsageError(f"there is no tier {name!r}; expected one of {', '.join(TIER_NAMES)}.")
    return TIERS[generation, name]


def tensor_dtype(tier: Tier, name: str, mtp_index: int | None) -> DType:
    """The format of tensor `name`; mtp_index is the MTP block's index, None without one."""
    if _SMALL.search(name):
        return F32
    if tier.unquantised is not None:
        return tier.unquantised if name.endswith(".weight") else F32
    if _GATES.search(name):
        return F16
    if name == DRAFT_HEAD or (name == HEAD and tier.one_head):
        return Q4_G64
    if name in (EMBEDDING, HEAD) or (mtp_index is not None and name.startswith(f"blk.{mtp_index}.")):
        return Q8_G128
    if _KEYS_VALUES.match(name):
        return Q8_G128
    if name.endswith(".weight"):
        return Q8_G128 if tier.promotion and re.search(tier.promotion, name) else Q4_G64
    return F32


def tier_entries(
    tier: str, generation: str, names: Iterable[str] | Mapping[str, tuple[int, ...]], mtp_index: int | None
) -> TierPlan:
    """Formats for `names`, the checkpoint's tensors; a mapping of names to shapes is checked against them.

    UsageError: unknown tier or generation. FileFormatError, naming the tensor: columns that its format's group does not
    divide, a one-dimensional tensor in a format with groups.
    """
    chosen = find_tier(tier, generation)
    dtypes = {name: tensor_dtype(chosen, name, mtp_index) for name in names if name != DRAFT_HEAD}
    source = None
    if chosen.num_heads == 2 and not {HEAD, EMBEDDING}.isdisjoint(dtypes):
        source = HEAD if HEAD in dtypes else EMBEDDING
        dtypes[DRAFT_HEAD] = Q4_G64
    if isinstance(names, Mapping):
        for name, dtype in dtypes.items():
            _check_shape(name, dtype, tuple(names[source if name == DRAFT_HEAD and source else name]), chosen)
    return TierPlan(chosen, dtypes, source)


def _check_shape(name: str, dtype: DType, shape: tuple[int, ...], tier: Tier) -> None:
    where = f"{name} {list(shape)} as {dtype.name} (tier {tier.name})"
    if dtype.group and len(shape) != 2:
        raise FileFormatError(f"{where}: expected [rows, cols].", "Use tier f16 or f32 for this checkpoint.")
    try:
        row_bytes(dtype, shape[-1])
    except FileFormatError as problem:
        raise FileFormatError(f"{where}: {problem.message}", "Use tier f16 or f32 for this checkpoint.") from None
