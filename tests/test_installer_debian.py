"""installers/install.sh in a bare Debian root made by debootstrap. Needs root, debootstrap, chroot and the network.

DEBIAN_ROOT names a root that is there already; it is copied, never changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("chroot") is None or shutil.which("unshare") is None
                       or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
                       reason="needs root, chroot and unshare"),
    pytest.mark.skipif(shutil.which("debootstrap") is None and not os.environ.get("DEBIAN_ROOT"), reason="no debootstrap (apt-get install debootstrap)"),
]
NETWORK = ("/etc/resolv.conf", "/etc/hosts")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""What this machine trusts; the root's own are made by packages that the installer brings in."""


@pytest.fixture(scope="module")
def debian(tmp_path_factory, long_scale):
    """A minimal Debian with this checkout at /source, an unprivileged user, and the machine's way to the network."""
    if long_scale < 1:
        pytest.skip("a whole Debian takes minutes: only at the full volume (Q27APP_LONG_SCALE=1)")
    folder = tmp_path_factory.mktemp("debian") / "root"
    ready = os.environ.get("DEBIAN_ROOT")
    if ready:
        subprocess.run(["cp", "-a", ready, str(folder)], check=True)
    else:
        done = subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"debootstrap cannot run here: {(done.stdout + done.stderr).strip().splitlines()[-1][:200]}")
    for name in NETWORK:
        if Path(name).exists():
            (folder / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, folder / name[1:])
    source = folder / "source"
    source.mkdir()
    if CERTIFICATES.exists():
        shutil.copyfile(CERTIFICATES, source / "certificates")
    for name in ("pyproject.toml", "README.md", "LICENSE", "q27app", "installers"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copyfile
        copy(REPOSITORY / name, source / name)
    subprocess.run(["chroot", str(folder), "useradd", "-m", "somebody"], check=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def install(root: Path, *flags: str, user: str = "root") -> subprocess.CompletedProcess[str]:
    home = "/root" if user == "root" else f"/home/{user}"
    kept = [f"{name}={os.environ[name]}" for name in ("http_proxy", "https_proxy", "PIP_INDEX_URL") if os.environ.get(name)]
    kept += ["PIP_CERT=/source/certificates"] if (root / "source/certificates").exists() else []
    # /proc in a mount namespace of its own: it goes with the command. Without it nothing knows how much memory is free.
    with_proc = ["unshare", "--mount", "sh", "-c", 'mount --bind /proc "$0/proc" && exec "$@"', str(root)]
    return subprocess.run([*with_proc, "chroot", f"--userspec={user}:{user}", str(root), "/usr/bin/env", "-i", f"HOME={home}", *kept,
                           "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "bash", "/source/installers/install.sh", *flags],
                          capture_output=True, text=True, timeout=1200, stdin=subprocess.DEVNULL)


def test_a_bare_root_without_python_with_an_old_one_and_with_a_good_one(debian):
    done = install(debian, "--no-demo", user="somebody")
    assert done.returncode == 1 and "sudo apt-get install -y python3 python3-venv" in done.stderr, done.stdout + done.stderr
    old = debian / "usr/local/bin/python3"
    old.write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\n')   # as a 3.9 with venv: too old, and says so
    old.chmod(0o755)
    done = install(debian, "--no-demo", user="somebody")
    assert done.returncode == 1 and "sudo apt-get install -y python3.11 python3.11-venv" in done.stderr
    old.unlink()
    done = install(debian, "--no-demo")
    assert done.returncode == 0 and "Installing python3 python3-venv" in done.stdout, done.stdout + done.stderr
    assert "GPU part: skipped, no NVIDIA device" in done.stdout
    subprocess.run(["chroot", str(debian), "apt-get", "remove", "-y", "python3-venv", "python3.11-venv"], check=True, capture_output=True)
    done = install(debian, "--no-demo", user="somebody")
    assert done.returncode == 1 and "with the venv module" in done.stderr and "python3-venv" in done.stderr
    done = install(debian)
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stdout + done.stderr
    done = install(debian, user="somebody")
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stdout + done.stderr
