"""The gated delta rule over whole sequences, in chunks of 64, with its gradient.

What happens inside the chunks is done for all of them at once (`within_chunks`); between them only the state is carried
(`CarryState`). Equals the step by step rule to 1e-14 in float64, gradients too. On a GPU both are Triton kernels
(`delta_rule_on_card`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, inner: Callable | None = None
) -> Tensor:
    """S = e^g S; S += k (beta (v - k S)); o = q S, in chunks of 64.

    query, key [batch, time, key heads, dim], value [batch, time, heads, dim] float32, beta and decay (g <= 0) [batch, time, heads];
    consecutive value heads share a key head. Within a chunk the corrected values solve a unit lower triangular system; between
    chunks the state is carried. Decays appear only as exponentials of differences that are at most 0. inner: `within_chunks`, or
    a fused form of it.
    """
    batch, time, heads, dim = value.shape
    query, key = (part.repeat_interleave(heads // part.shape[2], 2) for part in (query, key))
    padding = -time % CHUNK
    chunks = (time + padding) // CHUNK

    def split(x: Tensor) -> Tensor:
        if padding:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.view(batch, chunks, CHUNK, heads, *x.shape[3:]).transpose(2, 3).flatten(0, 1)

    query, key, value = split(query), split(key), split(value)           # [batch * chunks, heads, 64, dim]
    beta, decay = split(beta), split(decay)                               # [batch * chunks, heads, 64]
    inside = (inner or within_chunks)(query, key, value, beta, decay)
    state_key, new_value, scores, query, key, carry = inside

    def by_chunk(x: Tensor) -> Tensor:
        return x.view(batch, chunks, heads, *x.shape[2:]).transpose(0, 1).reshape(chunks, batch * heads, *x.shape[2:])

    states, corrected = CarryState.apply(*map(by_chunk, (state_key, new_value, key, carry)))
    out = torch.baddbmm(
        by_chunk(query).flatten(0, 1) @ states.flatten(0, 1), by_chunk(scores).flatten(0, 1), corrected.flatten(0, 1))
    out = out.view(chunks, batch, heads, CHUNK, dim).permute(1, 0, 3, 2, 4).reshape(batch, chunks * CHUNK, heads, dim)
    return out[:, :time] if padding else out


def delta_rule_on_card(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, batch: int) -> Tensor:
    """The same on a GPU: query, key [rows, key heads, dim], value [rows, heads, dim] bfloat16, beta, decay [rows, heads] float32, rows
    of `batch` sequences one after the other, each a multiple of 64 long -> [rows, heads, dim]."""
    from carry_kernel import CarryOnCard
    from chunk_kernel import InsideChunks

    state_key, new_value, scores, query, key, carry = InsideChunks.apply(query, key, value, beta, decay)
    states, corrected = CarryOnCard.apply(state_key, new_value, key, carry, batch)
    out = torch.baddbmm(query.flatten(0, 1) @ states.flatten(0, 1), scores.flatten(0, 1), corrected.flatten(0, 1))
    return out.view(scores.shape[:3] + value.shape[-1:]).transpose(1, 2).flatten(0, 1)


def within_chunks(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    """What the chunks' inner equations give, for all chunks at once: (state key, new value, scores, decayed query, decayed
    key, carry), each [chunks, heads, ...]. Products are of the type of query, key and value; gates and what is made of them
    alone are float32 (or wider)."""
    kind, total = query.dtype, decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    ratio = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    gram = (key @ key.transpose(-1, -2)) * ratio * beta[..., None]
    inverse = InvertUnitLower.apply(gram.tril(-1)).to(kind)
    grown = total.exp()[..., None]
    new_value = inverse @ (value * beta[..., None]).to(kind)
    state_key = inverse @ (key * (beta[..., None] * grown)).to(kind)
    scores = ((query @ key.transpose(-1, -2)) * ratio).to(kind)
    last = total[..., -1:]
    decayed_key = (key * (last - total).exp()[..., None]).to(kind)
    return state_key, new_value, scores, (query * grown).to(kind), decayed_key, last.exp()


class InvertUnitLower(torch.autograd.Function):
    """A, strictly lower triangular [..., 64, 64] -> (I + A)^-1, by joining neighbouring blocks of doubling size."""

    @staticmethod
    def forward(ctx, strict: Tensor) -> Tensor:
        size = strict.shape[-1]
        index = torch.arange(size, device=strict.device)
        inverse = torch.eye(size, device=strict.device, dtype=strict.dtype).expand_as(strict)
        block = 1
        while block < size:
            odd = (index // block) % 2 == 1
            pair = index // (2 * block)
            joins = odd[:, None] & ~odd[None, :] & (pair[:, None] == pair[None, :])
            step = strict * joins
            inverse = inverse - (step if block == 1 else inverse @ step @ inverse)
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


class CarryState(torch.autograd.Function):
    """The recurrence between chunks: v_n = new_n - k_n S_n; S_{n+1} = c_n S_n + w_n^T v_n, S_0 = 0.

    state_key and decayed key [chunks, n, 64, dim], new value the same, carry [chunks, n, 1]. Returns the states before each
    chunk [chunks, n, dim, dim] and the corrected values v.
    """

    @staticmethod
    def forward(ctx, state_key: Tensor, new_value: Tensor, key: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        chunks, count, _, dim = new_value.shape
        states = new_value.new_zeros(chunks + 1, count, key.shape[-1], dim)
        corrected = torch.empty_like(new_value)
        key_turned, carry_wide = key.transpose(-1, -2), carry[..., None]
        for n in range(chunks):
            torch.baddbmm(new_value[n], state_key[n], states[n], alpha=-1, out=corrected[n])
            torch.mul(states[n], carry_wide[n], out=states[n + 1])
            states[n + 1].baddbmm_(key_turned[n], corrected[n])
        ctx.save_for_backward(state_key, key, carry, states, corrected)
        return states[:-1], corrected

    @staticmethod
    def backward(ctx, grad_states: Tensor, grad_corrected: Tensor) -> tuple[Tensor, ...]:
        state_key, key, carry, states, corrected = ctx.saved_tensors
        chunks = len(key)
        flows = torch.zeros_like(states)  # flows[n]: gradient of the state before chunk n
        grad_value = torch.empty_like(corrected)
        state_key_turned, carry_wide = state_key.transpose(-1, -2), carry[..., None]
        for n in reversed(range(chunks)):
            torch.baddbmm(grad_corrected[n], key[n], flows[n + 1], out=grad_value[n])
            torch.addcmul(grad_states[n], flows[n + 1], carry_wide[n], out=flows[n])
            flows[n].baddbmm_(state_key_turned[n], grad_value[n], alpha=-1)
        after, before = flows[1:], states[:-1]
        grad_state_key = -(grad_value @ before.transpose(-1, -2))
        grad_key = corrected @ after.transpose(-1, -2)
        grad_carry = (before * after).sum((-1, -2))[..., None]
        return grad_state_key, grad_value, grad_key, grad_carry
