"""What could keep q27app from working on this machine: findings with stable ids, evidence and one command to fix each.

Nothing is changed and nothing is loaded. An NVIDIA device that cannot be used is a failure, never a reason to compute on
the CPU.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from q27app import gpu
from q27app.config import child_environment, config_path, load_config
from q27app.errors import Q27Error
from q27app.paths import cache_dir, data_dir, demo_model, resolve_model
from q27app.setup.cards import OLDEST

TOOLKITS = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")
ROOM_BYTES = 30 << 30
OLDEST_YEAR = 2025
FIRST_NVCC = (((8, 0), (11, 0)), ((8, 6), (11, 1)), ((8, 9), (11, 8)), ((9, 0), (11, 8)), ((10, 0), (12, 8)), ((12, 0), (12, 8)))
"""(capability, first CUDA whose compiler knows it)."""


@dataclass(frozen=True)
class Finding:
    """id: never changes its meaning. severity: ok, warning or failure. fix: a command, or ""."""

    id: str
    severity: str
    evidence: str
    fix: str = ""


def run_doctor() -> list[Finding]:
    """Every check; one that breaks is itself a finding."""
    found: list[Finding] = []
    for check in (check_python, check_clock, check_driver, check_toolkit, check_versions, check_pycuda, check_cards, check_kernels,
                  check_config, check_model, check_service, check_port, check_disk):
        found += _guarded(check)
    return found


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a check must not hide the others
        return [Finding("DOCTOR-CHECK", "warning", f"{check.__name__}: {type(error).__name__}: {error}")]


def check_python() -> list[Finding]:
    return [Finding("PYTHON", "ok", f"{sys.version.split()[0]} at {sys.executable}")]


def check_driver() -> list[Finding]:
    """GPU-NONE, GPU-DRIVER-MISMATCH, GPU-DRIVER, GPU-DRIVER-OK."""
    driver = gpu.read_driver()
    if driver is not None:
        cuda = ".".join(map(str, driver.cuda)) if driver.cuda else "unknown"
        return [Finding("GPU-DRIVER-OK", "ok", f"driver {driver.version}, CUDA up to {cuda}")]
    trouble = gpu.driver_trouble()
    if "mismatch" in trouble.lower():
        return [Finding("GPU-DRIVER-MISMATCH", "failure", f"{trouble}: the driver was updated while the old one is loaded",
                        "sudo reboot")]
    if gpu.nvidia_device_exists():
        return [Finding("GPU-DRIVER", "failure", f"there is an NVIDIA device, but its driver does not answer: {trouble}", "nvidia-smi")]
    return [Finding("GPU-NONE", "warning", "no NVIDIA device; q27app computes in NumPy here, slowly", "q27app serve --backend numpy")]


def _nvcc() -> str | None:
    own = Path(sys.prefix) / "bin" / "nvcc"  # where the installer puts one that it fetched
    return shutil.which("nvcc") or next((str(path) for path in (own, *TOOLKITS) if Path(path).is_file()), None)


def toolkit_of(nvcc: str) -> Path:
    """The folder of its toolkit. nvcc itself knows it, also where what is on PATH is a wrapper."""
    try:
        done = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, timeout=20, check=False,
                              env=child_environment())
    except (OSError, subprocess.SubprocessError):
        return Path(nvcc).resolve().parents[1]
    match = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return Path(match[1]).resolve() if match else Path(nvcc).resolve().parents[1]


def check_toolkit() -> list[Finding]:
    """CUDA-NVCC, CUDA-HEADERS: only where there is a device to compile for."""
    if not gpu.nvidia_device_exists():
        return []
    nvcc = _nvcc()
    if nvcc is None:
        return [Finding("CUDA-NVCC", "failure", "no nvcc on PATH or in /usr/local/cuda", "installers/install.sh"),
                Finding("CUDA-HEADERS", "failure", "no cuda.h: without a toolkit there are no headers", "installers/install.sh")]
    root = toolkit_of(nvcc)
    if not any((root / folder / "cuda.h").is_file() for folder in ("include", "targets/x86_64-linux/include")):
        return [Finding("CUDA-HEADERS", "failure", f"{nvcc} has no cuda.h in {root}", "installers/install.sh")]
    return [Finding("CUDA-NVCC-OK", "ok", nvcc)]


def check_clock(now: float | None = None) -> list[Finding]:
    """CLOCK: a clock that is years off breaks downloads (certificates) and every time in the log."""
    year = time.gmtime(time.time() if now is None else now).tm_year
    if not OLDEST_YEAR <= year < OLDEST_YEAR + 40:
        return [Finding("CLOCK", "warning", f"the clock says it is the year {year}", "sudo timedatectl set-ntp true")]
    return [Finding("CLOCK-OK", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))]


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """(major, minor) of a compiler, None if it does not tell."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False, env=child_environment())
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def compiler_verdict(nvcc: tuple[int, int], driver: tuple[int, int] | None, capability: tuple[int, int] | None) -> str:
    """Why this compiler's code would not run with this driver on this card, or ""."""
    if driver is not None and nvcc[0] > driver[0]:
        return f"nvcc {nvcc[0]}.{nvcc[1]} is newer than the driver's CUDA {driver[0]}.{driver[1]}"
    oldest = max((version for least, version in FIRST_NVCC if capability is not None and capability >= least), default=(0, 0))
    if nvcc < oldest:
        return f"nvcc {nvcc[0]}.{nvcc[1]} cannot compile for capability {capability[0]}.{capability[1]}, it takes {oldest[0]}.{oldest[1]}"
    return ""


def check_versions() -> list[Finding]:
    """CUDA-VERSIONS: compiler against driver and cards."""
    nvcc, driver = _nvcc(), gpu.read_driver()
    if nvcc is None or not gpu.nvidia_device_exists():
        return []
    version = nvcc_version(nvcc)
    if version is None:
        return [Finding("CUDA-VERSIONS", "failure", f"{nvcc} --version tells no version", "installers/install.sh")]
    cards = gpu.read_gpus()
    for capability in [card.compute_capability for card in cards] or [None]:
        if trouble := compiler_verdict(version, driver.cuda if driver else None, capability):
            return [Finding("CUDA-VERSIONS", "failure", trouble, "installers/install.sh")]
    return [Finding("CUDA-VERSIONS-OK", "ok", f"nvcc {version[0]}.{version[1]} goes with the driver and {len(cards)} card(s)")]


def check_kernels() -> list[Finding]:
    """KERNELS: whether anything is compiled for this machine yet. Made again at the first start where it is not."""
    if not gpu.read_gpus():
        return []
    found = [path for path in (cache_dir() / "kernels").glob("*.cubin")]
    if not found:
        return [Finding("KERNELS", "warning", "no kernel is compiled yet; the first start takes about a minute longer", "q27app kernels build")]
    return [Finding("KERNELS-OK", "ok", f"{len(found)} compiled files in {cache_dir() / 'kernels'}")]


def check_service() -> list[Finding]:
    """SERVICE, SERVICE-LINGER: only where the service is installed."""
    from q27app.setup.service import describe, unit_path, unit_text

    if not unit_path().exists():
        return [Finding("SERVICE-NONE", "ok", "the service is not installed")]
    if unit_path().read_text(errors="replace") != unit_text():
        return [Finding("SERVICE-UNIT", "warning", f"{unit_path()} is of another version or program folder", "q27app service install")]
    facts = describe()
    state = str(facts.get("ActiveState", "unknown"))
    found = [Finding("SERVICE-OK" if state == "active" else "SERVICE", "ok" if state == "active" else "warning",
                     f"the service is {state} ({facts.get('SubState')}), last result {facts.get('Result')}", "q27app service logs")]
    if facts["linger"] is False:
        found.append(Finding("SERVICE-LINGER", "warning", "the service stops at log-out and does not start at boot", "loginctl enable-linger"))
    return found


def check_pycuda() -> list[Finding]:
    """CUDA-PYCUDA, CUDA-BINDINGS, CUDA-COMPILER."""
    if not gpu.nvidia_device_exists():
        return []
    found = [Finding(name, "failure", f"the Python package {package} is not installed", "installers/install.sh")
             for name, package, module in (("CUDA-PYCUDA", "pycuda", "pycuda"), ("CUDA-BINDINGS", "cuda-bindings", "cuda"))
             if importlib.util.find_spec(module) is None]
    if shutil.which("c++") is None and shutil.which("g++") is None:
        found.append(Finding("CUDA-COMPILER", "failure", "no C++ compiler on PATH; nvcc needs one", "sudo apt-get install g++"))
    return found


def check_cards() -> list[Finding]:
    """GPU-CARD, GPU-TOO-OLD, GPU-USERS, GPU-POWER, GPU-PCIE for every card."""
    found = []
    for card in gpu.read_gpus():
        use, name = gpu.read_card_use(card.index), f"{card.name} {card.uuid}"
        if card.compute_capability and card.compute_capability < OLDEST:
            found.append(Finding("GPU-TOO-OLD", "failure", f"{name}: compute capability below 8.0", "q27app plan --gpu NAME"))
            continue
        found.append(Finding("GPU-CARD", "ok", f"{name}: {(card.memory_free or 0) / 1e9:.2f} GB of {(card.memory_total or 0) / 1e9:.2f} free"))
        for pid, program, size in use.users[:4]:
            if size > 1 << 30:
                found.append(Finding("GPU-USERS", "warning", f"{name}: {program} (process {pid}) holds {size / 1e9:.1f} GB", f"kill {pid}"))
        if use.power_default_w and card.power_limit_w and card.power_limit_w < 0.95 * use.power_default_w:
            found.append(Finding("GPU-POWER", "warning", f"{name}: limited to {card.power_limit_w:.0f} of {use.power_default_w:.0f} W",
                                 f"sudo nvidia-smi -i {card.index} -pl {use.power_default_w:.0f}"))
        if use.pcie and use.pcie_max and use.pcie[1] < use.pcie_max[1]:
            found.append(Finding("GPU-PCIE", "warning", f"{name}: {use.pcie[1]} of {use.pcie_max[1]} PCIe lanes", "nvidia-smi -q"))
    return found


def check_config() -> list[Finding]:
    try:
        load_config()
    except Q27Error as error:
        return [Finding("CONFIG", "failure", error.message, f"$EDITOR {config_path()}")]
    return [Finding("CONFIG-OK", "ok", str(config_path()))]


def check_model() -> list[Finding]:
    """MODEL-DEMO, MODEL: the header's checksum, every offset and size, and that the tensors make a model."""
    from q27app.setup.checkpoints import checkpoint_of

    found = []
    for name, path in (("MODEL-DEMO", lambda: demo_model()), ("MODEL", lambda: resolve_model(load_config().model.path))):
        try:
            checkpoint = checkpoint_of(path())
            found.append(Finding(f"{name}-OK", "ok", f"{checkpoint.name}, tier {checkpoint.tier}"))
        except (Q27Error, OSError) as error:
            found.append(Finding(name, "failure", str(error), "q27app list"))
    return found


def check_port() -> list[Finding]:
    server = load_config().server
    with socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            return [Finding("PORT", "warning", f"{server.host}:{server.port}: {error.strerror}; a daemon may run", "q27app status")]
    return [Finding("PORT-OK", "ok", f"{server.host}:{server.port} is free")]


def check_disk() -> list[Finding]:
    folder = next(path for path in (data_dir(), *data_dir().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        return [Finding("DISK", "warning", f"{free / 1e9:.1f} GB are free at {folder}; a 27B takes 16 to 29", f"du -sh {folder}")]
    return [Finding("DISK-OK", "ok", f"{free / 1e9:.0f} GB free at {folder}")]


def bundle(findings: list[Finding]) -> dict:
    """Everything worth attaching to a report, redacted: no keys, no home folder, no user name."""
    from q27app import __version__

    names = sorted(name for name in child_environment() if name.startswith(("Q27APP_", "CUDA_", "NVIDIA_")))
    tree = {"schema": 1, "version": __version__, "findings": [asdict(finding) for finding in findings], "variables": names}
    return _redacted(tree)


def _redacted(value):
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    if isinstance(value, str):
        text = value.replace(str(Path.home()), "~")
        return re.sub(r"\b(sk-|hf_)[A-Za-z0-9_-]{6,}|GPU-[0-9a-f-]{8,}", "***", text)
    return value
