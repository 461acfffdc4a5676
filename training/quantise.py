"""Trains the network to be good at the weights that a file of a tier will hold.

Before a step every matrix is replaced by its rounding, and put back before the update: the gradient at the rounded weight
moves the float32 one ("straight through"). Rounding is that of `q27app.weights.codecs`: scale = largest magnitude / 7 (or
127) of a group of columns, kept in float16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = {4: (7.0, 64), 8: (127.0, 128)}


def rounded(weight: Tensor, bits: int) -> Tensor:
    """[rows, cols] -> the values that Q4_G64 or Q8_G128 would store."""
    highest, group = LEVELS[bits]
    groups = weight.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / highest).clamp(min=1e-8)
    return ((groups / scale).round() * scale.half().float()).flatten(-2).to(weight.dtype)


class Rounding:
    """Owns copies of the unrounded matrices between apply() and restore().

    The q4s tier stores keys, values, embedding and draft layer in 8 bits, the gates' inputs as they are, the rest in 4 bits.
    """

    def __init__(self, network: nn.Module) -> None:
        self._bits: dict[nn.Parameter, int] = {}
        for name, module in network.named_modules():
            if not isinstance(module, (nn.Linear, nn.Embedding)) or name.endswith(("in_proj_a", "in_proj_b")):
                continue
            eight = name.startswith("mtp.") or name.endswith(("k_proj", "v_proj", "embed_tokens"))
            self._bits[module.weight] = 8 if eight else 4
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for weight, bits in self._bits.items():
            self._groups.setdefault((bits, *weight.shape), []).append(weight)
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def apply(self, tier: str = "q4s") -> None:
        """Put the tier's values in place, matrices of one shape at once. tier: q4s or q8."""
        self._kept = [torch.stack(weights) for weights in self._groups.values()]
        for (bits, *_), weights, kept in zip(self._groups, self._groups.values(), self._kept, strict=True):
            torch._foreach_copy_(weights, list(rounded(kept, 8 if tier == "q8" else bits).unbind(0)))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the unrounded values back."""
        for weights, kept in zip(self._groups.values(), self._kept, strict=True):
            torch._foreach_copy_(weights, list(kept.unbind(0)))
        self._kept = []
