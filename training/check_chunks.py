"""Checks the kernels of the delta rule against the plain form in float64, output and gradients.

    python training/check_chunks.py              on a GPU, in bfloat16
    TRITON_INTERPRET=1 python training/check_chunks.py    on a CPU, in float32, through Triton's interpreter

Prints relative errors and exits with 1 where one is above what the type explains.
"""

from __future__ import annotations

import builtins
import os
import sys

import torch
import torch.nn.functional as F

import carry_kernel
from delta_rule import delta_rule, delta_rule_on_card

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BATCH, TIME = 2, 192
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def made(kind: torch.dtype, device: str) -> list[torch.Tensor]:
    """query, key, value, beta, decay of random rows, as a layer makes them."""
    rows, key_heads, heads, dim = BATCH * TIME, 2, 6, 32 if INTERPRETED else 128
    query = F.normalize(torch.randn(rows, key_heads, dim), dim=-1) * dim**-0.5
    key = F.normalize(torch.randn(rows, key_heads, dim) + 0.3, dim=-1)
    gates = [torch.rand(rows, heads), -0.2 * torch.rand(rows, heads)]
    wide = [part.to(kind) for part in (query, key, torch.randn(rows, heads, dim))]
    return [part.to(device).requires_grad_() for part in (*wide, *gates)]


def main() -> int:
    torch.manual_seed(0)
    if INTERPRETED:  # which cannot count to a value that it was given
        carry_kernel.range = lambda count: builtins.range(int(count.handle.data.item()))
    kind, device = (torch.float32, "cpu") if INTERPRETED else (torch.bfloat16, "cuda")
    given = made(kind, device)
    plain = [part.detach().double().requires_grad_() for part in given]
    out = delta_rule_on_card(*given, BATCH)
    expected = delta_rule(*(part.unflatten(0, (BATCH, TIME)) for part in plain)).flatten(0, 1)
    direction = torch.randn_like(expected)
    (out.double() * direction).sum().backward()
    (expected * direction).sum().backward()
    pairs = [("out", out, expected), *((name, part.grad, other.grad) for name, part, other in
                                       zip(("query", "key", "value", "beta", "decay"), given, plain, strict=True))]
    errors = {name: float((part.detach().double() - other.detach()).norm() / other.detach().norm()) for name, part, other in pairs}
    print(" ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    return int(not max(errors.values()) < LIMITS[kind])


if __name__ == "__main__":
    sys.exit(main())
