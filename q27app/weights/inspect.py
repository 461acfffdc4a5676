"""What `q27app inspect FILE` shows of a `.q27` file: pure, from the header alone; no tensor data is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from q27app.weights.container import Container, Tensor
from q27app.weights.dtypes import ALL
from q27app.weights.tiers import DRAFT_HEAD, EMBEDDING, HEAD

LONGEST_VALUE = 100
"""Metadata values longer than this in JSON characters or elements are shown as their size."""

_TIER_KEYS = ("q27app.tier", "quant_policy")
_TOKENIZER_KEYS = ("tokenizer.huggingface.json", "tokenizer.ggml.tokens")


def describe(container: Container) -> dict[str, Any]:
    """A JSON-ready description.

    file {path, bytes}; model {name, generation, tier, vocab_size, tied, draft_head, tokenizer, chat_template};
    config: the `qwen35.*` keys without the prefix; metadata: every other key; long values of both as text like
    "<248320 elements>";
    totals {tensors, weights, bytes, bits_per_weight, formats: {name: {tensors, weights, bytes}}}; tensors: a list of
    {name, dtype, shape, bytes, scale_bytes, bits_per_weight} in file order.

    weights count each parameter once, so without the draft head's copy; bits_per_weight are all bytes over them.
    """
    metadata, tensors = container.metadata, container.tensors
    config = {
        key.removeprefix("qwen35."): _short(value) for key, value in metadata.items() if key.startswith("qwen35.")
    }
    other = {key: _short(value) for key, value in metadata.items() if not key.startswith("qwen35.")}
    return {
        "file": {"path": str(container.path), "bytes": container.file_bytes},
        "model": _describe_model(metadata, tensors),
        "config": config,
        "metadata": other,
        "totals": _describe_totals(tensors),
        "tensors": [_describe_tensor(tensor) for tensor in tensors.values()],
    }


def _describe_model(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    tokenizer = next((key for key in _TOKENIZER_KEYS if key in metadata), None)
    return {
        "name": _short(metadata.get("general.name")),
        "generation": _short(metadata.get("q27app.generation")),
        "tier": _short(next((metadata[key] for key in _TIER_KEYS if key in metadata), None)),
        "vocab_size": tensors[EMBEDDING].rows if EMBEDDING in tensors else None,
        "tied": HEAD not in tensors,
        "draft_head": DRAFT_HEAD in tensors,
        "tokenizer": tokenizer,
        "chat_template": "tokenizer.chat_template" in metadata,
    }


def _describe_totals(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    formats = {}
    for dtype in ALL:
        mine = [tensor for tensor in tensors.values() if tensor.dtype is dtype]
        if mine:
            formats[dtype.name] = {
                "tensors": len(mine),
                "weights": sum(map(_count, mine)),
                "bytes": sum(t.nbytes for t in mine),
            }
    weights = sum(_count(tensor) for tensor in tensors.values() if tensor.name != DRAFT_HEAD)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "tensors": len(tensors),
        "weights": weights,
        "bytes": size,
        "bits_per_weight": round(size * 8 / max(1, weights), 3),
        "formats": formats,
    }


def _describe_tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": tensor.data.nbytes,
        "scale_bytes": tensor.scales.nbytes if tensor.scales is not None else 0,
        "bits_per_weight": tensor.dtype.bits_per_weight,
    }


def _count(tensor: Tensor) -> int:
    return tensor.rows * tensor.cols


def _short(value: Any) -> Any:
    """`value`, or its size as text where it is long."""
    if isinstance(value, str) and len(value) > LONGEST_VALUE:
        return f"<{len(value)} characters>"
    if isinstance(value, (list, dict)) and (len(value) > LONGEST_VALUE or len(str(value)) > 4 * LONGEST_VALUE):
        return f"<{len(value)} elements>"
    return value


def render_description(description: Mapping[str, Any]) -> str:
    """The plain text of `describe`'s result: model, config, formats, tensor table."""
    model, totals = description["model"], description["totals"]
    lines = [f"{_printable(description['file']['path'])}  {_size(description['file']['bytes'])}", ""]
    head = "tied to the embedding" if model["tied"] else "own matrix"
    facts = {
        "name": model["name"] or "-",
        "generation": model["generation"] or "-",
        "tier": model["tier"] or "-",
        "vocabulary": model["vocab_size"] or "-",
        "head": head + (", with a Q4 copy for drafts" if model["draft_head"] else ""),
        "tokenizer": model["tokenizer"] or "not in this file",
        "weights": f"{totals['weights']:,} in {totals['tensors']} tensors, {totals['bits_per_weight']:.2f} bits each",
    }
    lines += _columns(facts)
    lines += ["", "config", *_columns(description["config"])]
    lines += ["", "metadata", *_columns(description["metadata"])]
    lines += ["", "format     tensors         weights        size"]
    for name, row in totals["formats"].items():
        lines.append(f"{name:<9} {row['tensors']:>8} {row['weights']:>15,} {_size(row['bytes']):>11}")
    width = max(len(tensor["name"]) for tensor in description["tensors"])
    lines += ["", f"{'tensor':<{width}}  format   {'shape':>17} {'size':>11}  bits"]
    for tensor in description["tensors"]:
        shape = " x ".join(str(number) for number in tensor["shape"])
        size = _size(tensor["bytes"] + tensor["scale_bytes"])
        lines.append(
            f"{tensor['name']:<{width}}  {tensor['dtype']:<8} {shape:>17} {size:>11}  {tensor['bits_per_weight']:g}"
        )
    return "\n".join(lines) + "\n"


def _columns(facts: Mapping[str, Any]) -> list[str]:
    """Aligned lines of key and value; a hostile file's control characters are escaped and cannot reach the terminal."""
    shown = {_printable(str(key)): _printable(str(value)) for key, value in facts.items()}
    width = max(map(len, shown), default=0)
    return [f"  {key:<{width}}  {value}" for key, value in shown.items()]


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _size(count: int) -> str:
    """Bytes in decimal units, as file sizes are published."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
