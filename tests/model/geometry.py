"""Metadata of published and small geometries, for tests of the model room."""

from __future__ import annotations


def metadata(
    *, layers: int = 4, interval: int = 4, mtp: int = 1, hidden: int = 256, ffn: int = 512, heads: int = 6, kv_heads: int = 1,
    head_dim: int = 256, key_heads: int = 2, value_heads: int = 6, context: int = 65536,
) -> dict:
    p = "qwen35."
    return {
        "general.architecture": "qwen35",
        "general.name": "test",
        p + "block_count": layers + mtp,
        p + "nextn_predict_layers": mtp,
        p + "context_length": context,
        p + "embedding_length": hidden,
        p + "feed_forward_length": ffn,
        p + "attention.head_count": heads,
        p + "attention.head_count_kv": kv_heads,
        p + "attention.key_length": head_dim,
        p + "attention.value_length": head_dim,
        p + "attention.layer_norm_rms_epsilon": 1e-6,
        p + "rope.freq_base": 1e7,
        p + "rope.dimension_count": 64,
        p + "ssm.conv_kernel": 4,
        p + "ssm.state_size": 128,
        p + "ssm.group_count": key_heads,
        p + "ssm.time_step_rank": value_heads,
        p + "ssm.inner_size": value_heads * 128,
        p + "full_attention_interval": interval,
    }


def kind_shapes(layers: int = 4, interval: int = 4, vocab: int = 512, hidden: int = 256, tied: bool = False) -> dict:
    """Just enough names for `ModelConfig.from_metadata` to see what each layer is."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for index in range(layers):
        kind = "attn_q" if (index + 1) % interval == 0 else "attn_qkv"
        shapes[f"blk.{index}.{kind}.weight"] = (1, hidden)
    return shapes


def config_27b():
    from q27app.model.config import ModelConfig

    meta = metadata(layers=64, hidden=5120, ffn=17408, heads=24, kv_heads=4, key_heads=16, value_heads=48, context=262144)
    return ModelConfig.from_metadata(meta, kind_shapes(64, 4, 248320, 5120))
