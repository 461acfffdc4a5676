"""Installing and running the clients that people use, at pinned versions, in an empty home."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

VERSIONS = {"@anthropic-ai/claude-code": "2.1.197", "@openai/codex": "0.171.0"}
PROGRAMS = {"@anthropic-ai/claude-code": "claude", "@openai/codex": "codex", "opencode-ai": "opencode"}
INSTALL_LIMIT_S = 240
RUN_LIMIT_S = 280


def install(package: str, folder: Path, version: str = "") -> str:
    """The package's program, installed from npm; skips the test by name where that cannot be."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{package}: npm is not installed")
    version = version or VERSIONS[package]
    command = [npm, "install", "--no-fund", "--no-audit", "--prefix", str(folder), f"{package}@{version}"]
    environment = {**os.environ, "npm_config_cache": str(folder / "cache")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package}: npm did not install version {version} within {INSTALL_LIMIT_S} s")
    program = folder / "node_modules" / ".bin" / PROGRAMS[package]
    if done.returncode != 0 or not program.exists():
        pytest.skip(f"{package}: version {version} cannot be installed: {done.stderr[-300:]}")
    return str(program)


async def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """(exit code, output, errors) of a program with nothing in its environment but PATH and what is given."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    return process.returncode, out.decode(), err.decode()


def claude_environment(url: str, home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "placeholder",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }


def write_codex_home(url: str, home: Path, catalogue: dict | None = None) -> dict[str, str]:
    """A configuration that names the daemon as the provider; the environment that goes with it."""
    folder = home / ".codex"
    folder.mkdir(parents=True)
    lines = ['model = "tiny-1"', 'model_provider = "q27app"']
    if catalogue is not None:
        (folder / "models.json").write_text(json.dumps({"models": catalogue["models"]}))
        lines.append(f"model_catalog_json = {json.dumps(str(folder / 'models.json'))}")
    lines += ["[model_providers.q27app]", 'name = "q27app"', f'base_url = "{url}/v1"', 'wire_api = "responses"']
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    return {"HOME": str(home), "CODEX_HOME": str(folder)}
