"""ROOM 3. The arithmetic, written twice: in NumPy to be read, in CUDA to be fast.

Start at backend.py (the one interface) and batch.py (what a pass is given); reference.py and reference_sample.py say what
every operation computes. The NumPy backend: numpy_backend.py, then numpy_pass, numpy_state, numpy_linear, numpy_attention,
numpy_delta. The CUDA backend: cuda_backend.py, launch.py (the device), cuda_weights (how matrices lie), cuda_linear,
cuda_attention and cuda_mixers (the stages), cuda_ready and cuda_follow (rows that they leave each other), cuda_state and cuda_lacking
(what belongs to sequences), cu/*.cu; compiler.py and card.py. kv_formats.py is the table of key and value formats, kv_codecs and
kv_turned are their codecs. Imports: weights, ground floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from q27app.errors import UsageError

if TYPE_CHECKING:
    from q27app.kernels.backend import Backend

BACKEND_NAMES = ("auto", "cuda", "numpy")


def open_backend(name: str = "auto", nvcc: str | None = None, gpu: str = "auto") -> Backend:
    """Open a backend. "auto" is CUDA if this machine has an NVIDIA device, else NumPy. nvcc: the CUDA compiler, None = looked for.
    gpu: which card, as model.gpu says; the process sees no other from then on.

    Raises GpuError if a device is there, or was asked for, and cannot be used: never NumPy in its place. UsageError for an
    unknown name."""
    if name not in BACKEND_NAMES:
        raise UsageError(f"backend {name!r} is unknown.", f"Choose one of {', '.join(BACKEND_NAMES)}.")
    if name == "auto":
        from q27app.gpu import nvidia_device_exists

        name = "cuda" if nvidia_device_exists() else "numpy"
    if name == "cuda":
        from q27app.config import played_card
        from q27app.gpu import show_only
        from q27app.kernels.cuda_backend import CudaBackend
        from q27app.paths import cache_dir

        show_only(gpu)
        force_arch, memory_cap = played_card()
        return CudaBackend.open(cache_dir() / "kernels", nvcc=nvcc, force_arch=force_arch, memory_cap=memory_cap)
    from q27app.kernels.numpy_backend import NumpyBackend

    return NumpyBackend()
