"""What a card can do at most, measured on it: the ceilings that every other kernel's figures are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from q27app.errors import GpuError
from q27app.kernels import cuda_args
from q27app.kernels.compiler import Job
from q27app.kernels.launch import Device

THREADS, BLOCKS_EACH, CHAINS, MMA_FLOPS, READS = 256, 8, 8, 4096, 8
READINGS = 8
"""Queued behind each other and timed as one: the host's clock sees a launch and a wait too, some 20 us on a busy host, and one
reading takes hardly ten times that."""
JOB = Job.of("peaks", {})


@dataclass(frozen=True)
class Peaks:
    """gb_per_s: reading memory. tflop_per_s: matrix instructions of fp16 with float32 sums, as our kernels use them."""

    gb_per_s: float
    tflop_per_s: float


def expected_read(words: np.ndarray, threads: int) -> np.ndarray:
    """uint32 [threads]: the exclusive or that peak_read leaves. words: uint32 [n, 4]."""
    each = np.bitwise_xor.reduce(words, axis=1)
    return np.bitwise_xor.reduce(each.reshape(-1, threads), axis=0)


def read_once(device: Device, data: int, out: int, num_words: int, blocks: int) -> None:
    """Launch one reading of num_words 16-byte words; out: address of uint32 [blocks * THREADS]."""
    if num_words % (READS * blocks * THREADS):
        raise GpuError(f"{num_words} words are not whole rounds of {blocks} blocks.", "Use a multiple of 8 words a thread.")
    device.launch(device.module(JOB)["peak_read"], (blocks,), THREADS, 0, cuda_args.Peaks(data, out, num_words, 0), False)


def multiply_rounds(device: Device, out: int, rounds: int, blocks: int) -> int:
    """Launch `rounds` rounds of matrix instructions; returns the floating-point operations. out: f32 [blocks * THREADS]."""
    device.launch(device.module(JOB)["peak_mma"], (blocks,), THREADS, 0, cuda_args.Peaks(0, out, 0, rounds), False)
    return blocks * (THREADS // 32) * CHAINS * MMA_FLOPS * rounds


def measure_peaks(device: Device, num_bytes: int = 1 << 30, rounds: int = 20_000, repeats: int = 5) -> Peaks:
    """Best of `repeats`. Takes about num_bytes of free memory for the time of the call. Raises GpuError, OutOfMemory."""
    device.prepare([JOB])
    blocks = device.card.num_sms * BLOCKS_EACH
    unit = READS * blocks * THREADS
    num_words = max(1, num_bytes // 16 // unit) * unit
    data, out = device.allocate(num_words * 16), device.allocate(4 * blocks * THREADS)
    try:
        device.fill(data, num_words * 16)
        seconds = _best(device, lambda: [read_once(device, data, out, num_words, blocks) for _ in range(READINGS)], repeats) / READINGS
        flops = multiply_rounds(device, out, rounds, blocks)
        multiplying = _best(device, lambda: multiply_rounds(device, out, rounds, blocks), repeats)
    finally:
        device.synchronize()
        device.release(data)
        device.release(out)
    return Peaks(num_words * 16 / seconds / 1e9, flops / multiplying / 1e12)


def _best(device: Device, run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, the first one not counted."""
    taken = []
    for _ in range(repeats + 1):
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
