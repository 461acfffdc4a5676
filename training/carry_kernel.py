"""The delta rule's recurrence between chunks as two Triton kernels: the state stays in registers, in float32.

Same equations as `delta_rule.CarryState`, for inputs in bfloat16 [batch * chunks, heads, 64, dim] on a GPU.
A program owns one head of one sequence and a block of the value's columns, and walks over the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
"""Columns of the value that a program owns."""


@triton.jit
def _forward(state_key, new_value, key, carry, states, corrected, chunks, heads,
             CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, inner = tl.arange(0, CHUNK), tl.arange(0, DIM)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    state = tl.zeros((DIM, WIDTH), tl.float32)
    for chunk in range(chunks):
        base = ((sequence * chunks + chunk) * heads + head).to(tl.int64)
        wide = base * CHUNK * DIM + rows[:, None] * DIM
        w = tl.load(state_key + wide + inner[None, :])
        k = tl.load(key + wide + inner[None, :])
        u = tl.load(new_value + wide + columns[None, :]).to(tl.float32)
        half = state.to(w.dtype)
        tl.store(states + base * DIM * DIM + inner[:, None] * DIM + columns[None, :], half)
        v = (u - tl.dot(w, half)).to(w.dtype)
        tl.store(corrected + wide + columns[None, :], v)
        state = state * tl.load(carry + base) + tl.dot(tl.trans(k), v)


@triton.jit
def _backward(state_key, key, carry, grad_states, grad_corrected, grad_value, after, chunks, heads,
              CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, inner = tl.arange(0, CHUNK), tl.arange(0, DIM)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    flow = tl.zeros((DIM, WIDTH), tl.float32)
    for step in range(chunks):
        base = ((sequence * chunks + chunks - 1 - step) * heads + head).to(tl.int64)
        wide = base * CHUNK * DIM + rows[:, None] * DIM
        square = base * DIM * DIM + inner[:, None] * DIM + columns[None, :]
        w = tl.load(state_key + wide + inner[None, :])
        k = tl.load(key + wide + inner[None, :])
        half = flow.to(w.dtype)
        tl.store(after + square, half)
        grad = (tl.load(grad_corrected + wide + columns[None, :]).to(tl.float32) + tl.dot(k, half)).to(w.dtype)
        tl.store(grad_value + wide + columns[None, :], grad)
        flow = tl.load(grad_states + square).to(tl.float32) + flow * tl.load(carry + base) - tl.dot(tl.trans(w), grad)


class CarryOnCard(torch.autograd.Function):
    """state_key, new_value, key [batch * chunks, heads, 64, dim], carry [batch * chunks, heads, 1] float32 -> (states before
    each chunk [batch * chunks, heads, dim, dim], corrected values), both of the inputs' type."""

    @staticmethod
    def forward(ctx, state_key: Tensor, new_value: Tensor, key: Tensor, carry: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        state_key, new_value, key, carry = (part.contiguous() for part in (state_key, new_value, key, carry))
        count, heads, chunk, dim = new_value.shape
        states = new_value.new_empty(count, heads, dim, dim)
        corrected = torch.empty_like(new_value)
        _forward[batch * heads, dim // BLOCK](state_key, new_value, key, carry, states, corrected, count // batch, heads,
                                              chunk, dim, BLOCK, num_warps=4)
        ctx.save_for_backward(state_key, key, carry, states, corrected)
        ctx.batch = batch
        return states, corrected

    @staticmethod
    def backward(ctx, grad_states: Tensor, grad_corrected: Tensor) -> tuple[Tensor | None, ...]:
        state_key, key, carry, states, corrected = ctx.saved_tensors
        count, heads, chunk, dim = corrected.shape
        grad_value, after = torch.empty_like(corrected), torch.empty_like(states)
        _backward[ctx.batch * heads, dim // BLOCK](
            state_key, key, carry, grad_states.contiguous(), grad_corrected.contiguous(), grad_value, after, count // ctx.batch,
            heads, chunk, dim, BLOCK, num_warps=4)
        grad_state_key = -(grad_value @ states.transpose(-1, -2))
        grad_key = corrected @ after.transpose(-1, -2)
        grad_carry = (states * after).sum((-1, -2), dtype=torch.float32)[..., None]
        return grad_state_key, grad_value, grad_key, grad_carry, None
