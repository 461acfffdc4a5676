"""The checkpoints of the family and what a tier makes of them: geometry, bytes, quality, bytes read for a token.

Bytes come from the same tables that conversion uses (`weights.tiers`), so a planned file and a converted one agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from q27app.errors import UsageError
from q27app.model.config import ModelConfig
from q27app.model.weights import expected_shapes
from q27app.weights.dtypes import row_bytes, scales_per_row
from q27app.weights.tiers import DRAFT_HEAD, EMBEDDING, HEAD, QUANTISED_TIERS, find_tier, tier_entries

PERPLEXITY = {
    "3.6": {"q4s": 8.0197, "default": 8.0409, "q5f": 7.9491, "q6": 7.9460, "q6f": 7.9189, "q6k": 7.9127, "q8": 7.9942},
    "3.8": {"q4s": 7.3765, "default": 7.3121, "q5f": 7.3039, "q6": 7.2233, "q6f": 7.2636, "q6k": 7.1718},
}
"""wikitext-2, windows of 2,048 tokens; lower is better. q5f and q6f of 3.8 are those of the 3.6 recipes."""
CLOSE = 1.01
"""A tier within this factor of the best perplexity is as good: task suites don't tell them apart."""


@dataclass(frozen=True)
class Checkpoint:
    """One model that could be served. path, weights and embed (bytes of its embedding) are set for a
    file that exists; tier then is the file's own."""

    name: str
    config: ModelConfig
    generation: str
    path: str = ""
    tier: str = ""
    weights: int = 0
    embed: int = 0

    def bytes_of(self, tier: str) -> int:
        """Bytes of the tensors in a tier; those of the file if there is one."""
        return self.weights or _tier_bytes(self.config, tier, self.generation)[0]

    def embed_bytes(self, tier: str) -> int:
        """Bytes of the embedding table that may stay in host memory; 0 where it is the head as well."""
        return 0 if self.config.tied else self.embed if self.path else _tier_bytes(self.config, tier, self.generation)[2]

    def streamed(self, tier: str) -> int:
        """Bytes read to compute one token without drafts: every matrix but the embedding, the head once."""
        return _tier_bytes(self.config, tier, self.generation)[1]


def _family(name: str, hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, ffn: int, tied: bool) -> ModelConfig:
    kinds = tuple("attention" if index % 4 == 3 else "delta" for index in range(layers))
    return ModelConfig(
        name=name, num_layers=layers, layer_kinds=kinds, num_mtp_layers=1, hidden_size=hidden, intermediate_size=ffn,
        vocab_size=248_320, num_heads=heads, num_kv_heads=kv_heads, head_dim=256, rotary_dim=64, rope_theta=1e7,
        delta_key_heads=16, delta_value_heads=value_heads, delta_head_dim=128, conv_width=4, norm_eps=1e-6,
        max_context=262_144, tied=tied)


_27B = _family("Qwen3.6-27B", 5120, 64, 24, 4, 48, 17408, False)
FAMILY = (
    Checkpoint("Qwen3.6-27B", _27B, "3.6"),
    Checkpoint("Qwen3.8-27B", replace(_27B, name="Qwen3.8-27B"), "3.8"),
    Checkpoint("Qwen3.5-9B", _family("Qwen3.5-9B", 4096, 32, 16, 4, 32, 12288, False), "3.6"),
    Checkpoint("Qwen3.5-4B", _family("Qwen3.5-4B", 2560, 32, 16, 4, 32, 9216, True), "3.6"),
    Checkpoint("Qwen3.5-2B", _family("Qwen3.5-2B", 2048, 24, 8, 2, 16, 6144, True), "3.6"),
    Checkpoint("Qwen3.5-0.8B", _family("Qwen3.5-0.8B", 1024, 24, 8, 2, 16, 3584, True), "3.6"),
)
"""The two that q27app is made for, then smaller ones, largest first."""


def family_checkpoint(generation: str) -> Checkpoint:
    """The 27B of a generation, "3.6" or "3.8". Raises UsageError."""
    for checkpoint in FAMILY[:2]:
        if checkpoint.generation == generation:
            return checkpoint
    raise UsageError(f"generation {generation!r} is not published.", "Choose 3.6 or 3.8.")


def checkpoint_of(path: Path) -> Checkpoint:
    """The checkpoint that a .q27 file holds; reads its header only. Raises FileFormatError."""
    from q27app.weights.container import open_container

    with open_container(path) as container:
        shapes = {name: tuple(tensor.shape) for name, tensor in container.tensors.items()}
        config = ModelConfig.from_metadata(container.metadata, shapes)
        metadata: dict[str, Any] = dict(container.metadata)
        size = sum(tensor.nbytes for tensor in container.tensors.values())
        embed = container.tensors[EMBEDDING].nbytes
    tier = str(metadata.get("q27app.tier", metadata.get("quant_policy", "")))[:40]
    generation = str(metadata.get("q27app.generation", "3.6"))[:20]
    return Checkpoint(config.name, config, generation, str(path), tier or "unknown", size, embed)


def good_tiers(generation: str, prefer: str) -> list[str]:
    """Tiers worth choosing, the smallest first and the wanted one last. prefer: speed, window, balanced or quality.

    speed, window: only the smallest. balanced: up to the smallest whose perplexity is close to the best. quality: up to the best.
    """
    table = PERPLEXITY[generation if generation in PERPLEXITY else "3.6"]
    best = min(table.values())
    by_size = sorted(table, key=lambda tier: family_checkpoint("3.6").bytes_of(tier))
    if prefer in ("speed", "window"):
        return by_size[:1]
    limit = best * CLOSE if prefer == "balanced" else best
    wanted = next(tier for tier in by_size if table[tier] <= limit)
    ladder: list[str] = []
    for tier in by_size[:by_size.index(wanted) + 1]:
        if not ladder or table[tier] < table[ladder[-1]]:
            ladder.append(tier)
    return ladder


@cache
def _tier_bytes(config: ModelConfig, tier: str, generation: str) -> tuple[int, int, int]:
    """(all bytes, bytes read for a token, bytes of the embedding)."""
    generation = generation if generation in PERPLEXITY else "3.6"
    if tier not in QUANTISED_TIERS:
        find_tier(tier, generation)
    shapes = expected_shapes(config)
    plan = tier_entries(tier, generation, shapes, config.num_layers if config.num_mtp_layers else None)
    sizes = {}
    for name, dtype in plan.dtypes.items():
        shape = shapes[plan.draft_head_source if name == DRAFT_HEAD else name]
        rows = shape[0] if len(shape) == 2 else 1
        sizes[name] = rows * (row_bytes(dtype, shape[-1]) + scales_per_row(dtype, shape[-1]) * dtype.scale_bytes)
    head = HEAD if HEAD in sizes else EMBEDDING
    skipped = (EMBEDDING, HEAD, DRAFT_HEAD, f"blk.{config.num_layers}.")
    body = sum(size for name, size in sizes.items() if not name.startswith(skipped))
    return sum(sizes.values()), body + sizes[head], sizes[EMBEDDING]
