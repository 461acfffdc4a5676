"""What happens inside the chunks of the delta rule, as two Triton kernels: forward, and the gradient.

Same equations as `delta_rule.within_chunks`, one program a chunk and value head, everything between loads and stores in registers.
Query and key are read where they lie, [rows, key heads, dim], once a value head, so nothing is repeated or turned in memory.

With X = (I + A)^-1, W = X (beta e^t k) and U = X (beta v), the gradient of A is -(X^T dW W^T + X^T dU U^T): no product of the
inverse with itself is needed, and X is kept in the type of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
WARPS, WARPS_BACK = 4, 4


@triton.jit
def _ratio(total, rows, CHUNK: tl.constexpr):
    """e^(t_i - t_j) where i >= j, else 0."""
    lower = rows[:, None] >= rows[None, :]
    return tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _forward(query, key, value, beta, decay, state_key, new_value, scores, grown_query, decayed_key, carry, inverse,
             heads, key_heads, CHUNK: tl.constexpr, DIM: tl.constexpr):
    unit, head = tl.program_id(0).to(tl.int64), tl.program_id(0) % heads
    rows, inner = tl.arange(0, CHUNK), tl.arange(0, DIM)
    row = unit // heads * CHUNK + rows
    shared = (row * key_heads + head * key_heads // heads)[:, None] * DIM + inner[None, :]
    k, q = tl.load(key + shared), tl.load(query + shared)
    b, g = tl.load(beta + row * heads + head), tl.load(decay + row * heads + head)
    total, last = tl.cumsum(g, 0), tl.sum(g, 0)
    ratio = _ratio(total, rows, CHUNK)
    strict = tl.dot(k, tl.trans(k)) * ratio * b[:, None]
    strict = tl.where(rows[:, None] > rows[None, :], strict, 0.0)
    pair = rows[:, None] // 2 == rows[None, :] // 2
    x = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0) - tl.where(pair, strict, 0.0)
    for level in tl.static_range(1, 6):  # neighbouring inverted blocks of 2^level rows are joined
        size = 1 << level
        odd = (rows[:, None] // size) % 2 > (rows[None, :] // size) % 2
        step = tl.where(odd & (rows[:, None] // (2 * size) == rows[None, :] // (2 * size)), strict, 0.0)
        x -= tl.dot(tl.dot(x, step), x)
    grown = tl.exp(total)
    half = x.to(k.dtype)
    wide = unit * CHUNK * DIM + rows[:, None] * DIM + inner[None, :]
    square = unit * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    tl.store(inverse + square, half)
    tl.store(scores + square, (tl.dot(q, tl.trans(k)) * ratio).to(k.dtype))
    tl.store(grown_query + wide, (q * grown[:, None]).to(k.dtype))
    tl.store(decayed_key + wide, (k * tl.exp(last - total)[:, None]).to(k.dtype))
    tl.store(state_key + wide, tl.dot(half, (k * (b * grown)[:, None]).to(k.dtype)).to(k.dtype))
    v = tl.load(value + (row * heads + head)[:, None] * DIM + inner[None, :])
    tl.store(new_value + wide, tl.dot(half, (v * b[:, None]).to(k.dtype)).to(k.dtype))
    tl.store(carry + unit, tl.exp(last))


@triton.jit
def _backward(query, key, value, beta, decay, state_key, new_value, inverse,
              grad_state_key, grad_new_value, grad_scores, grad_grown, grad_decayed, grad_carry,
              grad_query, grad_key, grad_value, grad_beta, grad_decay,
              heads, key_heads, CHUNK: tl.constexpr, DIM: tl.constexpr):
    unit, head = tl.program_id(0).to(tl.int64), tl.program_id(0) % heads
    rows, inner = tl.arange(0, CHUNK), tl.arange(0, DIM)
    row = unit // heads * CHUNK + rows
    shared = (row * key_heads + head * key_heads // heads)[:, None] * DIM + inner[None, :]
    own = (row * heads + head)[:, None] * DIM + inner[None, :]
    wide = unit * CHUNK * DIM + rows[:, None] * DIM + inner[None, :]
    square = unit * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    b, g = tl.load(beta + row * heads + head), tl.load(decay + row * heads + head)
    total, last = tl.cumsum(g, 0), tl.sum(g, 0)
    grown, left = tl.exp(total), tl.exp(last - total)
    ratio = _ratio(total, rows, CHUNK)
    x = tl.load(inverse + square)
    # new values: U = X (beta v)
    given = tl.dot(tl.trans(x), tl.load(grad_new_value + wide))
    v = tl.load(value + own)
    tl.store(grad_value + own, (given * b[:, None]).to(x.dtype))
    to_beta = tl.sum(given * v, 1)
    to_strict = tl.dot(given.to(x.dtype), tl.trans(tl.load(new_value + wide)))
    # what is read of the state: W = X (beta e^t k)
    k = tl.load(key + shared)
    given = tl.dot(tl.trans(x), tl.load(grad_state_key + wide))
    to_strict += tl.dot(given.to(x.dtype), tl.trans(tl.load(state_key + wide)))
    along = tl.sum(given * k, 1) * grown
    to_beta += along
    to_total = along * b
    to_key = given * (b * grown)[:, None]
    # A = (k k^T) ratio beta below the diagonal
    to_strict = tl.where(rows[:, None] > rows[None, :], -to_strict * ratio, 0.0)
    moved = to_strict * tl.dot(k, tl.trans(k))
    to_beta += tl.sum(moved, 1)
    moved *= b[:, None]
    to_total += tl.sum(moved, 1) - tl.sum(moved, 0)
    to_gram = (to_strict * b[:, None]).to(x.dtype)
    to_key += tl.dot(to_gram, k) + tl.dot(tl.trans(to_gram), k)
    # scores = (q k^T) ratio
    q = tl.load(query + shared)
    to_scores = tl.load(grad_scores + square) * ratio
    moved = to_scores * tl.dot(q, tl.trans(k))
    to_total += tl.sum(moved, 1) - tl.sum(moved, 0)
    to_scores = to_scores.to(x.dtype)
    to_key += tl.dot(tl.trans(to_scores), q)
    # e^t q, and e^(last - t) k
    given = tl.load(grad_grown + wide) * grown[:, None]
    to_total += tl.sum(given * q, 1)
    tl.store(grad_query + own, (given + tl.dot(to_scores, k)).to(x.dtype))
    given = tl.load(grad_decayed + wide) * left[:, None]
    along = tl.sum(given * k, 1)
    tl.store(grad_key + own, (to_key + given).to(x.dtype))
    to_last = tl.sum(along, 0) + tl.load(grad_carry + unit) * tl.exp(last)
    to_total += tl.where(rows == CHUNK - 1, to_last, 0.0) - along
    tl.store(grad_beta + row * heads + head, to_beta)
    tl.store(grad_decay + row * heads + head, tl.cumsum(to_total, 0, reverse=True))


class InsideChunks(torch.autograd.Function):
    """query, key [rows, key heads, dim], value [rows, heads, dim] of one type, beta, decay [rows, heads] float32; rows of all sequences
    one after the other, each a multiple of 64 long -> what `within_chunks` returns, [rows / 64, heads, ...]."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
        query, key, value, beta, decay = (part.contiguous() for part in (query, key, value, beta, decay))
        rows, heads, dim = value.shape
        chunks, key_heads = rows // CHUNK, key.shape[1]
        wide = [value.new_empty(chunks, heads, CHUNK, dim) for _ in range(4)]
        state_key, new_value, grown_query, decayed_key = wide
        scores, inverse = (value.new_empty(chunks, heads, CHUNK, CHUNK) for _ in range(2))
        carry = beta.new_empty(chunks, heads, 1)
        _forward[chunks * heads,](query, key, value, beta, decay, state_key, new_value, scores, grown_query, decayed_key, carry,
                                  inverse, heads, key_heads, CHUNK, dim, num_warps=WARPS)
        ctx.save_for_backward(query, key, value, beta, decay, state_key, new_value, inverse)
        return state_key, new_value, scores, grown_query, decayed_key, carry

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, beta, decay, state_key, new_value, inverse = ctx.saved_tensors
        rows, heads, dim = value.shape
        key_heads = key.shape[1]
        to_query, to_key, to_value = (torch.empty_like(value) for _ in range(3))
        to_beta, to_decay = torch.empty_like(beta), torch.empty_like(decay)
        _backward[rows // CHUNK * heads,](query, key, value, beta, decay, state_key, new_value, inverse,
                                          *(grad.contiguous() for grad in grads), to_query, to_key, to_value, to_beta, to_decay,
                                          heads, key_heads, CHUNK, dim, num_warps=WARPS_BACK)
        to_query, to_key = (part.unflatten(1, (key_heads, -1)).sum(2) for part in (to_query, to_key))
        return to_query, to_key, to_value, to_beta, to_decay
