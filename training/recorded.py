"""Gradients of a step from recorded CUDA graphs: one launch in place of thousands.

A step of 65,536 tokens keeps a host busier than its card. What a step does depends on the length of its sequences and on how many
drafts it trains, so there is a graph for each pair. A graph is checked once against the same gradients made launch by launch; whatever
goes wrong, recording ends and the run goes on without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Gradients = Callable[[Tensor, Tensor, int], list[Tensor]]
TOLERANCE = 0.05
"""Of losses and of gradients as a whole, relative: atomics and rounding to bfloat16 differ from pass to pass by less."""


class Recorded:
    """Calls `gradients(tokens, weights, drafts)`, which adds to the parameters' gradients and returns losses, or its recording.

    prepare() records; after it a call whose shape was recorded is replayed. Gradients then lie in buffers that are kept.
    """

    def __init__(self, network: nn.Module, gradients: Gradients) -> None:
        self._network, self._gradients = network, gradients
        self._graphs: dict[tuple, tuple] = {}
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._pool = self._aside = None

    def __call__(self, tokens: Tensor, weights: Tensor, drafts: int) -> list[Tensor]:
        """Losses of one pass; the parameters' gradients are set, None where the pass has none."""
        found = self._graphs.get((*tokens.shape, drafts))
        if found is None:
            return self._gradients(tokens, weights, drafts)
        graph, inputs, losses, used = found
        inputs[0].copy_(tokens, non_blocking=True)
        inputs[1].copy_(weights, non_blocking=True)
        graph.replay()
        for param in used:
            param.grad = self._buffers[param]
        return losses

    @property
    def device(self) -> torch.device:
        return next(self._network.parameters()).device

    def prepare(self, tokens: Tensor, weights: Tensor, shapes: Iterable[tuple[int, int]], until: float) -> bool:
        """Record a pass over these tokens for each (length, drafts), rows of that length made of them; leaves no gradients behind. until:
        clock after which no more are recorded. False if one could not be: then none is used."""
        tokens, weights = tokens.to(self.device).flatten(), weights.to(self.device).flatten()
        try:
            for length, drafts in shapes:
                if time.time() < until:
                    self._record(tokens.view(-1, length), weights.view(-1, length), drafts)
        except Exception as error:  # whatever it is, the run can do without
            print(f"no recorded steps: {type(error).__name__}: {str(error)[:300]}", flush=True)
            self._graphs.clear()
        for param in self._network.parameters():
            param.grad = None
        return bool(self._graphs)

    def _record(self, tokens: Tensor, weights: Tensor, drafts: int) -> None:
        params = list(self._network.parameters())
        for param in params:
            param.grad = None
        aside = self._aside = self._aside or torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # as a recording wants it; all kernels are made here
            expected = [float(loss.detach()) for loss in self._gradients(tokens, weights, drafts)]
            used = [param for param in params if param.grad is not None]
            wanted = [param.grad for param in used]
            for param in params:
                param.grad = None
            for param in used:
                if param not in self._buffers:
                    self._buffers[param] = torch.zeros_like(param)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        buffers, inputs = [self._buffers[param] for param in used], (tokens.clone(), weights.clone())
        for param, buffer in zip(used, buffers, strict=True):
            param.grad = buffer
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            torch._foreach_zero_(buffers)
            losses = [loss.detach() for loss in self._gradients(*inputs, drafts)]
        self._pool = graph.pool()
        graph.replay()
        torch.cuda.synchronize()
        apart = max(abs(float(loss) - value) / max(abs(value), 0.05) for loss, value in zip(losses, expected, strict=True))
        norm = torch.stack(torch._foreach_norm(wanted)).square().sum().sqrt()
        wrong = torch.stack(torch._foreach_norm(torch._foreach_sub(buffers, wanted))).square().sum().sqrt() / norm
        if not (apart < TOLERANCE and float(wrong) < TOLERANCE):
            raise RuntimeError(f"{tuple(tokens.shape)}, {drafts} drafts: losses off by {apart:.4f}, gradients by {float(wrong):.4f}")
        self._graphs[*tokens.shape, drafts] = graph, inputs, losses, used
