"""Translates a Hugging Face folder's side files to `.q27` metadata: geometry, name, tokenizer, chat template.

The keys are GGUF's, so that a model reads the same whether it came from safetensors or from GGUF. Whatever the
network's code fixes (gates, activation, number of value dimensions) is checked here and refused by the config's own
key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q27app.errors import FileFormatError, ModelError
from q27app.weights.source import parse_json_object, read_small_file

MAX_TOKENIZER_BYTES = 64 << 20
MAX_SIDE_FILE_BYTES = 16 << 20
MAX_INTEGER = 1 << 30
ARCHITECTURE = "qwen35"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")

FIXED = {
    "attn_output_gate": True, "output_gate_type": "swish", "attention_bias": False, "hidden_act": "silu",
    "mtp_use_dedicated_embeddings": False,
}
"""Config keys with one possible value; absent means that value."""


class _Config:
    """The text model's part of config.json; every complaint names key, value and expectation."""

    def __init__(self, top: Mapping[str, Any], where: str) -> None:
        self.where = where
        nested = top.get("text_config", top)
        if not isinstance(nested, dict):
            raise self.refuse("text_config", nested, "an object")
        self.top, self.text = top, nested
        for kind in (top.get("model_type"), nested.get("model_type", top.get("model_type"))):
            if kind not in MODEL_TYPES:
                raise self.refuse("model_type", kind, " or ".join(MODEL_TYPES))
        rope = nested.get("rope_parameters", nested.get("rope_scaling")) or {}
        if not isinstance(rope, dict):
            raise self.refuse("rope_parameters", rope, "an object")
        self.rope = rope

    def refuse(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is {str(value)[:80]}, expected {expected}.",
                          "Only the dense Qwen3.5 family (Qwen3.5, 3.6 and 3.8) runs.")

    def integer(self, key: str, low: int = 1, default: int | None = None) -> int:
        value = self.text.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INTEGER:
            raise self.refuse(key, value, f"an integer from {low} to {MAX_INTEGER}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """From the config itself or its rope_parameters; two different values are refused."""
        values = [level[key] for level in (self.text, self.rope) if level.get(key) is not None]
        value = values[0] if values else default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            raise self.refuse(key, value, f"a number above {low:g} and up to {high:g}")
        if any(other != value for other in values):
            raise self.refuse(f"rope_parameters.{key}", values[-1], f"the {value} that stands beside it")
        return float(value)

    def refuse_other_values(self) -> None:
        for key, expected in FIXED.items():
            value = self.text.get(key, expected)
            if value is None or value != expected or type(value) is not type(expected):
                raise self.refuse(key, value, str(expected))
        for key in ("quantization_config", "compression_config"):
            if self.top.get(key) or self.text.get(key):
                raise self.refuse(key, self.top.get(key) or self.text.get(key), "none: BF16, F16 or F32 weights")
        if self.rope.get("rope_type", self.rope.get("type", "default")) not in ("default", "mrope"):
            raise self.refuse("rope_parameters.rope_type", self.rope.get("rope_type", self.rope.get("type")), "default")
        key_dim, value_dim = self.integer("linear_key_head_dim"), self.integer("linear_value_head_dim")
        if key_dim != value_dim:
            raise self.refuse("linear_value_head_dim", value_dim, f"linear_key_head_dim = {key_dim}")

    def recurrent_layers(self, num_layers: int) -> list[bool]:
        kinds = self.text.get("layer_types")
        if kinds is None:
            interval = self.integer("full_attention_interval", default=4)
            return [(index + 1) % interval != 0 for index in range(num_layers)]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise self.refuse("layer_types", kinds, f"a list of num_hidden_layers = {num_layers} entries")
        for index, kind in enumerate(kinds):
            if kind not in ("linear_attention", "full_attention"):
                raise self.refuse(f"layer_types[{index}]", kind, "linear_attention or full_attention")
        return [kind == "linear_attention" for kind in kinds]

    @property
    def tied(self) -> bool | None:
        """None where the two places disagree; the presence of the head then decides."""
        told = {bool(level["tie_word_embeddings"]) for level in (self.top, self.text) if "tie_word_embeddings" in level}
        return told.pop() if len(told) == 1 else (None if told else False)


def config_metadata(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], bool | None]:
    """(`general.*` and `qwen35.*` keys, are the embeddings tied: None if unclear). ModelError names the key."""
    c = _Config(config, f"{folder / 'config.json'}")
    c.refuse_other_values()
    num_layers, num_mtp = c.integer("num_hidden_layers"), c.integer("mtp_num_hidden_layers", low=0, default=0)
    head_dim = c.integer("head_dim")
    value_heads, delta_dim = c.integer("linear_num_value_heads"), c.integer("linear_key_head_dim")
    rotary = head_dim * c.number("partial_rotary_factor", 0.0, 1.0, default=0.25)
    if rotary != int(rotary) or int(rotary) % 2:
        raise c.refuse("partial_rotary_factor", rotary / head_dim,
                       f"a share that gives an even part of head_dim = {head_dim}")
    values: dict[str, Any] = {
        "block_count": num_layers + num_mtp,
        "nextn_predict_layers": num_mtp,
        "context_length": c.integer("max_position_embeddings"),
        "embedding_length": c.integer("hidden_size"),
        "feed_forward_length": c.integer("intermediate_size"),
        "attention.head_count": c.integer("num_attention_heads"),
        "attention.head_count_kv": c.integer("num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.number("rms_norm_eps", 0.0, 1e-2),
        "rope.freq_base": c.number("rope_theta", 1.0, 1e12),
        "rope.dimension_count": int(rotary),
        "ssm.conv_kernel": c.integer("linear_conv_kernel_dim"),
        "ssm.state_size": delta_dim,
        "ssm.group_count": c.integer("linear_num_key_heads"),
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * delta_dim,
        "attention.recurrent_layers": c.recurrent_layers(num_layers) + [False] * num_mtp,
        "vocab_size": c.integer("vocab_size"),
    }
    if "full_attention_interval" in c.text:
        values["full_attention_interval"] = c.integer("full_attention_interval")
    sections = c.rope.get("mrope_section")
    if isinstance(sections, list) and len(sections) == 3 and all(isinstance(n, int) for n in sections):
        values["rope.dimension_sections"] = [*sections, 0]
    name = _model_name(config, folder)
    general = {"general.architecture": ARCHITECTURE, "general.type": "model", "general.name": name}
    return general | {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}, c.tied


def _model_name(config: Mapping[str, Any], folder: Path) -> str:
    """The repository's name where the folder tells it (as in the download cache), else what the config says."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1][:200]
    told = config.get("_name_or_path")
    return told.rstrip("/").split("/")[-1][:200] if isinstance(told, str) and told.strip("/") else folder.name[:200]


def tokenizer_metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.huggingface.json`, `tokenizer.chat_template` and ending tokens' ids, as far as the folder has them."""
    values: dict[str, Any] = {}
    side: dict[str, Any] = {}
    settings, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if settings.exists():
        side = parse_json_object(read_small_file(settings, MAX_SIDE_FILE_BYTES), str(settings))
    ids: dict[str, int] = {}
    if tokenizer.exists():
        raw = read_small_file(tokenizer, MAX_TOKENIZER_BYTES)
        added = parse_json_object(raw, str(tokenizer)).get("added_tokens")
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and isinstance(token.get("content"), str) and isinstance(token.get("id"), int):
                ids[token["content"]] = token["id"]
        values["tokenizer.huggingface.json"] = raw.decode("utf-8")
    template = _chat_template(folder, side)
    if template:
        values["tokenizer.chat_template"] = template
    endings = _ending_ids(folder, config)
    for key, name in (("eos_token", "eos"), ("bos_token", "bos"), ("pad_token", "padding")):
        token = side.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in ids:
            values[f"tokenizer.ggml.{name}_token_id"] = ids[text]
    if endings:
        values.setdefault("tokenizer.ggml.eos_token_id", endings[0])
        first = values["tokenizer.ggml.eos_token_id"]
        values["q27app.eos_token_ids"] = [first, *(end for end in endings if end != first)]
    return values


def _chat_template(folder: Path, side: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template (a text, or a list whose "default" counts)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return read_small_file(file, MAX_SIDE_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise FileFormatError(f"{file} is not UTF-8.") from None
    told = side.get("chat_template")
    if isinstance(told, list):
        named = {item.get("name"): item.get("template") for item in told if isinstance(item, dict)}
        told = named.get("default")
    return told if isinstance(told, str) else None


def _ending_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json; each a number or a list."""
    places: list[Any] = []
    generation = folder / "generation_config.json"
    if generation.exists():
        told = parse_json_object(read_small_file(generation, MAX_SIDE_FILE_BYTES), str(generation))
        places.append(told.get("eos_token_id"))
    text = config.get("text_config")
    places += [config.get("eos_token_id"), text.get("eos_token_id") if isinstance(text, dict) else None]
    for place in places:
        found = place if isinstance(place, list) else [place]
        if found and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in found):
            return found[:16]
    return []
