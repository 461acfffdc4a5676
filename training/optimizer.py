"""Muon for the matrices of the network, AdamW for everything else.

Muon: momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz steps in bfloat16 (Jordan et al., 2024).
Matrices of one shape are orthogonalised in one batched call.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, rows, cols] -> the same with singular values near 1; quintic Newton-Schulz, coefficients of the reference."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    turned = x.shape[-2] > x.shape[-1]
    if turned:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if turned else x


class Muon(torch.optim.Optimizer):
    """lr is the root mean square of an update relative to a matrix with unit rows; weight_decay is decoupled."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[tuple(param.shape)].append(param)
            for shape, params in by_shape.items():
                self._step_shape(group, shape, params)

    def _step_shape(self, group: dict, shape: tuple[int, ...], params: list[nn.Parameter]) -> None:
        for param in params:
            if "momentum" not in self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        grads, momenta = [param.grad for param in params], [self.state[param]["momentum"] for param in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        directions = orthogonalise(torch.stack(updates)).float().unbind(0)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(directions), alpha=-group["lr"] * scale)


def make_optimizers(network: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """[Muon over 2-D weights of the layers, AdamW over embedding, head, convolution, norms, gates]."""
    matrices, others = [], []
    for name, param in network.named_parameters():
        is_matrix = param.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if is_matrix and min(param.shape) > 8 else others).append(param)
    adam = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=torch.cuda.is_available())
    return [Muon(matrices, lr=matrix_lr), adam]
