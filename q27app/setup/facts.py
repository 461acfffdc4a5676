"""What the set-up dialogue knows about this machine before it asks anything. `read_facts` reads it once; nothing is changed."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from q27app import gpu
from q27app.config import SECTIONS, Config, load_config
from q27app.errors import FileFormatError, GpuError, Q27Error
from q27app.paths import data_dir, installed_models
from q27app.setup.checkpoints import Checkpoint, checkpoint_of
from q27app.setup.doctor import Finding, run_doctor
from q27app.setup.launch import CLIENTS
from q27app.setup.machine import read_machine
from q27app.setup.plan import Machine


@dataclass(frozen=True)
class Facts:
    """See the module.

    machines: the cards that answer. has_device: there is an NVIDIA device, usable or not. models: what the models folder
    holds. sources: (generation, tier) -> "OWNER/REPO:FILE" where it can be downloaded. current: "section.key" -> the value
    that counts now. clients: coding clients that are installed.
    """

    findings: tuple[Finding, ...] = ()
    machines: tuple[Machine, ...] = ()
    has_device: bool = False
    models: tuple[Checkpoint, ...] = ()
    sources: Mapping[tuple[str, str], str] = field(default_factory=dict)
    disk_free: int = 0
    has_user_manager: bool = False
    has_service: bool = False
    lingers: bool | None = None
    daemon_answers: bool = False
    current: Mapping[str, Any] = field(default_factory=dict)
    clients: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "failure")


def read_facts() -> Facts:
    """Ask the driver, the disk, systemd and the configuration. Raises UsageError for a configuration that cannot be read."""
    from q27app.setup.models import known_sources
    from q27app.setup.service import lingers, manager_answers, unit_path

    config = load_config()
    has_manager = manager_answers()
    return Facts(
        findings=tuple(run_doctor()),
        machines=_machines(),
        has_device=gpu.nvidia_device_exists(),
        models=tuple(_models()),
        sources=known_sources(config.model.repos),
        disk_free=shutil.disk_usage(next(path for path in (data_dir(), *data_dir().parents) if path.exists())).free,
        has_user_manager=has_manager,
        has_service=unit_path().exists(),
        lingers=lingers() if has_manager else None,
        daemon_answers=_answers(config.server.host, config.server.port),
        current=values_of(config),
        clients=tuple(name for name in CLIENTS if shutil.which(name)),
    )


def values_of(config: Config) -> dict[str, Any]:
    """ "section.key" -> value."""
    return {f"{section}.{item.name}": getattr(getattr(config, section), item.name)
            for section, kind in SECTIONS.items() for item in fields(kind)}


def _machines() -> tuple[Machine, ...]:
    found = []
    for card in gpu.read_gpus():
        try:
            found.append(read_machine(card))
        except GpuError:  # the doctor tells of it
            continue
    return tuple(found)


def _models() -> list[Checkpoint]:
    found = []
    for path in installed_models():
        try:
            found.append(checkpoint_of(path))
        except (FileFormatError, Q27Error, OSError):
            continue
    return found


def _answers(host: str, port: int) -> bool:
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((address, port), timeout=0.3):
            return True
    except OSError:
        return False
