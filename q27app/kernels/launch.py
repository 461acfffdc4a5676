"""The device: primary context, one stream, modules, launches. The only owner of CUDA handles.

`Device` is what the backend asks of it; `CudaDevice` answers through PyCUDA (context, memory) and cuda-bindings (modules,
launches with attributes, graphs) on the same primary context and stream. The test suite has another one on the CPU.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from q27app.errors import GpuError, OutOfMemory
from q27app.gpu import card_used
from q27app.kernels.card import Card, forced_card
from q27app.kernels.compiler import Compiler, Job
from q27app.kernels.staging import Staging

CONTEXT_BYTES = 600 << 20
"""What a context and its modules take of a card, about."""

LIKELY_CONTEXT = range(32 << 20, 1 << 30)
"""Where others took or gave memory at the same moment, a difference is outside of this and CONTEXT_BYTES stands for it."""

USUAL_CARVEOUT = 50
"""Percent of a multiprocessor's first cache that is shared memory, one division for the kernels of a decode step: it must
drain before it changes it. The other half keeps activations near the row family; a kernel that needs more shared memory
gets it all the same, the number is a wish. Attention of a decode step is worth two changes: with all of it, more of its blocks
fit, which is a third less time deep in a context and costs a few microseconds a layer near its beginning."""

LARGE_SHARED = ("linear_tiles", "attend_prefill", "delta_chunk", "delta_flow", "attend_decode")
"""Sources of a prompt's large kernels and of attention, most of them several blocks a multiprocessor: all of it is shared memory."""

MAX_CONFIGS = 4096
"""Shapes of launches that are kept."""

_DRIVER_HINT = "q27app doctor says what is missing."


def _between(before: int | None, after: int | None) -> int:
    """Bytes that a context took, from readings of the card."""
    taken = -1 if before is None or after is None else after - before
    return taken if taken in LIKELY_CONTEXT else CONTEXT_BYTES


class Device(Protocol):
    """Addresses are integers. Everything but `download` and `synchronize` may be asynchronous, in order."""

    card: Card
    context_bytes: int
    """Memory of the card that the context itself took, programs included as far as they are known."""

    def free_bytes(self) -> int: ...
    def allocate(self, nbytes: int) -> int: ...
    def release(self, address: int) -> None: ...
    def upload(self, address: int, data: np.ndarray) -> None: ...
    def download(self, address: int, nbytes: int, out: np.ndarray | None = None) -> np.ndarray:
        """Waits. uint8 [nbytes]; out: memory for it, contiguous."""
        ...
    def copy(self, target: int, source: int, nbytes: int) -> None: ...
    def fill(self, address: int, nbytes: int) -> None:
        """Zeros."""
        ...
    def prepare(self, jobs: list[Job], progress: Callable[[int, int], None] | None = None) -> None: ...
    def module(self, job: Job) -> Mapping[str, Any]: ...
    def launch(self, function: Any, grid: tuple[int, ...], block: int, shared: int, args: ctypes.Structure,
               dependent: bool) -> None: ...
    def record(self, run: Callable[[], None]) -> Callable[[], None]: ...
    def pinned(self, nbytes: int) -> np.ndarray: ...
    def host_memory(self, nbytes: int) -> int:
        """Page-locked host memory that kernels read and write in place, at this address of theirs; lives as long as the device."""
        ...
    def upload_pinned(self, address: int, data: np.ndarray) -> None: ...
    def download_pinned(self, data: np.ndarray, address: int) -> None:
        """Into page-locked memory; there when an event marked after it is."""
        ...
    def download_beside(self, data: np.ndarray, address: int) -> Any:
        """The same after everything so far, while what comes later runs. An event of its own, for `is_done` and `wait`."""
        ...
    def mark(self) -> Any: ...
    def wait(self, event: Any) -> None: ...
    def forget(self, event: Any) -> None:
        """Of a `mark` that nobody will wait for."""
        ...
    def is_done(self, event: Any) -> bool: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class CudaDevice:
    """One card's primary context. Made, used and closed on one thread."""

    def __init__(self, cache: Path, index: int = 0, nvcc: str | None = None, force_arch: str | None = None,
                 memory_cap: int | None = None) -> None:
        try:
            import pycuda.driver as pycuda
            from cuda.bindings import driver
        except ImportError as error:
            raise GpuError(f"The GPU packages are not installed: {error}.", 'pip install "q27app[cuda13]"') from error
        self._pycuda, self._driver = pycuda, driver
        self._closed = False
        try:
            pycuda.init()
            self._device = pycuda.Device(index)
            before = card_used(self._device.pci_bus_id())
            self._context = self._device.retain_primary_context()
            self._context.push()
        except pycuda.Error as error:
            raise GpuError(f"The CUDA driver refuses device {index}: {error}.", _DRIVER_HINT) from error
        attribute, name = pycuda.device_attribute, self._device.name()
        card = Card(name, tuple(self._device.compute_capability()), self._device.get_attribute(attribute.MULTIPROCESSOR_COUNT),
                    self._device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
                    self._device.get_attribute(attribute.MAX_THREADS_PER_MULTIPROCESSOR))
        if card.capability < (8, 0):
            raise GpuError(f"{name} has compute capability {card.capability[0]}.{card.capability[1]}, expected 8.0 or newer.")
        self.card = forced_card(card, force_arch)
        self.compiler = Compiler(cache, self.card.target, nvcc)
        self._stream = pycuda.Stream()
        self._handle = driver.CUstream(self._stream.handle)
        self._allocations: dict[int, Any] = {}
        self._modules: dict[Job, dict[str, Any]] = {}
        self._images: list[Any] = []
        self._graphs: list[Any] = []
        self._host_arrays: list[np.ndarray] = []
        self._staging = Staging(pycuda.pagelocked_empty(1 << 24, np.uint8))
        self._now = self._passed = 0
        self._side: Any = None
        self._capturing = False
        self._configs: dict[tuple, Any] = {}
        self._pointers = (ctypes.c_void_p * 1)()
        self._events: list[Any] = []
        """Those that nobody waits for."""
        self.context_bytes = _between(before, card_used(self._device.pci_bus_id()))
        atexit.register(self.close)
        if memory_cap:
            self._hold_ballast(memory_cap)

    def _hold_ballast(self, cap: int) -> None:
        """Take memory away so that this process finds what a card of `cap` bytes would have left, its context counted."""
        spare = self.free_bytes() - max(0, cap - CONTEXT_BYTES)
        if spare > 0:
            self.allocate(spare)

    def _check(self, result: tuple) -> Any:
        code, *values = result
        if int(code) != 0:
            _, name = self._driver.cuGetErrorName(code)
            _, text = self._driver.cuGetErrorString(code)
            raise GpuError(f"CUDA error {int(code)} ({(name or b'?').decode()}): {(text or b'').decode()}.",
                           "Restart the daemon; if it comes back, q27app doctor.")
        return values[0] if len(values) == 1 else values

    def free_bytes(self) -> int:
        return int(self._pycuda.mem_get_info()[0])

    def allocate(self, nbytes: int) -> int:
        try:
            allocation = self._pycuda.mem_alloc(max(nbytes, 256))
        except self._pycuda.MemoryError as error:
            raise OutOfMemory(f"{nbytes} bytes are needed on the GPU and {self.free_bytes()} are free.",
                              "Use a smaller context, fewer slots or a smaller tier.") from error
        self._allocations[int(allocation)] = allocation
        return int(allocation)

    def release(self, address: int) -> None:
        self._allocations.pop(address).free()

    def upload(self, address: int, data: np.ndarray) -> None:
        self._staging.upload(self, address, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def upload_pinned(self, address: int, data: np.ndarray) -> None:
        self._check(self._driver.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, self._handle))

    def download_pinned(self, data: np.ndarray, address: int) -> None:
        self._check(self._driver.cuMemcpyDtoHAsync(data.ctypes.data, address, data.nbytes, self._handle))

    def pinned(self, nbytes: int) -> np.ndarray:
        return self._pycuda.pagelocked_empty(nbytes, np.uint8)

    def host_memory(self, nbytes: int) -> int:
        flags = self._pycuda.host_alloc_flags
        try:
            array = self._pycuda.pagelocked_empty(nbytes, np.uint8, mem_flags=flags.DEVICEMAP | flags.PORTABLE)
        except self._pycuda.Error as error:
            raise OutOfMemory(f"{nbytes} bytes of page-locked host memory are needed and the system does not give them: {error}.",
                              "Keep the table on the card: --embed device.") from error
        self._host_arrays.append(array)
        return int(array.base.get_device_pointer())

    def download(self, address: int, nbytes: int, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(nbytes, np.uint8) if out is None else out
        self._staging.download(self, address, out)
        return out

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._check(self._driver.cuMemcpyDtoDAsync(target, source, nbytes, self._handle))

    def fill(self, address: int, nbytes: int) -> None:
        self._check(self._driver.cuMemsetD8Async(address, 0, nbytes, self._handle))

    def download_beside(self, data: np.ndarray, address: int) -> Any:
        driver = self._driver
        if self._side is None:
            self._side = self._check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        before, after = self._check(driver.cuEventCreate(flags)), self._check(driver.cuEventCreate(flags))
        self._check(driver.cuEventRecord(before, self._handle))
        self._check(driver.cuStreamWaitEvent(self._side, before, 0))
        self._check(driver.cuEventDestroy(before))
        self._check(driver.cuMemcpyDtoHAsync(data.ctypes.data, address, data.nbytes, self._side))
        self._check(driver.cuEventRecord(after, self._side))
        return after, 0

    def is_done(self, event: Any) -> bool:
        code, = self._driver.cuEventQuery(event[0])
        if code == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((code,))
        return True

    def mark(self) -> Any:
        """An event after everything so far; `wait` makes the host wait for it."""
        if self._events:
            event = self._events.pop()
        else:
            event = self._check(self._driver.cuEventCreate(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._check(self._driver.cuEventRecord(event, self._handle))
        self._now += 1
        return event, self._now

    def wait(self, event: Any) -> None:
        """Once for each `mark`, or `forget`."""
        handle, number = event
        self._check(self._driver.cuEventSynchronize(handle))
        self._events.append(handle)
        self._passed = max(self._passed, number)

    def forget(self, event: Any) -> None:
        """Instead of `wait`."""
        self._events.append(event[0])

    def moment(self) -> int:
        """Now, for `has_passed`: whether the host has waited since for something that came after everything so far."""
        return self._now

    def has_passed(self, moment: int) -> bool:
        return self._passed > moment

    @property
    def is_recording(self) -> bool:
        return self._capturing

    def prepare(self, jobs: list[Job], progress: Callable[[int, int], None] | None = None) -> None:
        self.compiler.build(jobs, progress)

    def module(self, job: Job) -> Mapping[str, Any]:
        """Functions of a source by name; loaded once, with the card's full shared memory allowed."""
        if job not in self._modules:
            module = self._load(job)
            count = self._check(self._driver.cuModuleGetFunctionCount(module))
            functions = {}
            for function in self._check(self._driver.cuModuleEnumerateFunctions(count, module)):
                name = self._check(self._driver.cuFuncGetName(function)).decode()
                self._allow_shared(function, name, 100 if job.source in LARGE_SHARED else USUAL_CARVEOUT)
                functions[name] = function
            self._modules[job] = functions
        return self._modules[job]

    def _load(self, job: Job) -> Any:
        """A module that the driver takes: what it refuses (damaged, or of another kind of card) is compiled again, once."""
        for attempt in range(2):
            image = self.compiler.get(job) + b"\0" * self.card.forced
            code, module = self._driver.cuModuleLoadData(image)
            if int(code) == 0:
                self._images.append((module, image))
                return module
            if attempt == 0:
                self.compiler.forget(job)
        return self._check((code,))

    def _allow_shared(self, function: Any, name: str, carveout: int) -> None:
        attribute = self._driver.CUfunction_attribute
        static = self._check(self._driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        if static > self.card.shared_bytes:
            raise GpuError(f"{name} takes {static} bytes of shared memory, the limit here is {self.card.shared_bytes}.")
        self._check(self._driver.cuFuncSetAttribute(
            function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.card.shared_bytes - static))
        self._check(self._driver.cuFuncSetAttribute(
            function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout))

    def launch(self, function: Any, grid: tuple[int, ...], block: int, shared: int, args: ctypes.Structure,
               dependent: bool) -> None:
        config = self._configs.get((grid, block, shared, dependent))
        if config is None:
            if len(self._configs) >= MAX_CONFIGS:
                self._configs.clear()
            config = self._configs[grid, block, shared, dependent] = self._config(grid, block, shared, dependent)
        self._pointers[0] = ctypes.addressof(args)
        self._check(self._driver.cuLaunchKernelEx(config, function, ctypes.addressof(self._pointers), 0))

    def _config(self, grid: tuple[int, ...], block: int, shared: int, dependent: bool) -> Any:
        """Shape and attributes of a launch. Making one takes longer than the launch, so they are kept."""
        driver = self._driver
        assert shared <= self.card.shared_bytes and block <= 1024, (shared, block)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = shared, self._handle
        if dependent and self.card.has_dependent_launch:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        else:
            config.numAttrs = 0
        return config

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What `run` launches, as a graph. `graph.Graph` is the replay."""
        from q27app.kernels.graph import Graph

        self._capturing = True
        try:
            graph = Graph.capture(self._driver, self._check, self._handle, run)
        finally:
            self._capturing = False
        self._graphs = [*(held for held in self._graphs if held.is_open), graph]
        return graph

    def synchronize(self) -> None:
        self._check(self._driver.cuStreamSynchronize(self._handle))
        self._now += 1
        self._passed = self._now

    def close(self) -> None:
        """Give everything back. The context itself belongs to the process and is released, not destroyed."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._stream.synchronize()
            if self._side is not None:
                self._check(self._driver.cuStreamSynchronize(self._side))
                self._check(self._driver.cuStreamDestroy(self._side))
            for graph in self._graphs:
                graph.close()
            for allocation in self._allocations.values():
                allocation.free()
        except (self._pycuda.Error, GpuError):
            pass   # after an error that sticks, the driver takes everything back with the context
        for event in self._events:
            self._driver.cuEventDestroy(event)
        for module, _ in self._images:
            self._driver.cuModuleUnload(module)
        for held in (self._configs, self._events, self._graphs, self._allocations, self._host_arrays, self._modules, self._images):
            held.clear()
        self._staging.close()
        del self._stream
        self._context.pop()
        self._context.detach()

