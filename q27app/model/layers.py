"""One layer of the network, in the five stages of `kernels.backend.Backend`. This is the forward pass.

    norm(v) = v / sqrt(mean(v^2) + eps) * w        (w as stored in the container: 1 + the Hugging Face value)

    attention:  q, gate, k, v = norm(x) W_qgkv      per query head: D query values, then D gate values
                q, k = rope(norm(q)), rope(norm(k)) rotary dims first, in halves
                x += (softmax(q k / sqrt(D)) v * sigmoid(gate)) W_o
    delta:      u, z, b, a = norm(x) W_uzba
                c = silu(causal depthwise convolution of u)  -> q, k (l2-normalised, q / sqrt(Dk)), v
                S = exp(A softplus(a + dt)) S;  S += k (sigmoid(b) (v - k S));  o = q S
                x += (norm(o) silu(z)) W_out        value head h reads key head h % Nk
    both:       x += (silu(norm(x) W_gate) * norm(x) W_up) W_down
"""

from __future__ import annotations

from dataclasses import dataclass

from q27app.kernels.backend import Backend, Buffer
from q27app.model.config import ModelConfig
from q27app.model.weights import AttentionLayer, DeltaLayer


@dataclass(frozen=True)
class Scratch:
    """Activations of a pass, [max_rows, width] float32; reused by every layer."""

    attention_in: Buffer
    attention_out: Buffer
    delta_in: Buffer
    delta_out: Buffer
    ffn: Buffer

    @classmethod
    def allocate(cls, backend: Backend, config: ModelConfig, max_rows: int) -> "Scratch":
        def empty(width: int, name: str) -> Buffer:
            return backend.empty((max_rows, width), "float32", name)

        return cls(
            empty(config.attention_project_width, "attention_in"),
            empty(config.attention_width, "attention_out"),
            empty(config.delta_project_width, "delta_in"),
            empty(config.delta_width, "delta_out"),
            empty(config.intermediate_size, "ffn"),
        )


def run_layer(backend: Backend, layer: AttentionLayer | DeltaLayer, x: Buffer, scratch: Scratch, behind: AttentionLayer | DeltaLayer | None = None) -> None:
    """x [rows, hidden] becomes the layer's output, in place. behind: the layer that reads it next."""
    rows = x.shape[0]
    if isinstance(layer, AttentionLayer):
        y, o = scratch.attention_in.rows(rows), scratch.attention_out.rows(rows)
        backend.project(layer.norm, layer.project, x, y)
        backend.attend(y, layer, o)
    else:
        y, o = scratch.delta_in.rows(rows), scratch.delta_out.rows(rows)
        backend.project(layer.norm, layer.project, x, y)
        backend.delta(y, layer, o)
    backend.add_linear(layer.output, o, x, layer.feed_forward.norm)
    h = scratch.ffn.rows(rows)
    backend.gate_up(layer.feed_forward.norm, layer.feed_forward.gate_up, x, h)
    backend.add_linear(layer.feed_forward.down, h, x, behind.norm if behind is not None else None)
