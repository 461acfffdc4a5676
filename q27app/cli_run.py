"""Commands that run the daemon: serve, demo."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from q27app.errors import EngineDied, Q27Error, Unreachable

QUESTION = "What are you, and does everything work?"
START_LIMIT_S = 300.0
STOP_LIMIT_S = 15.0


@click.command()
@click.option("--model", "-m", metavar="M", help="Path, name in the models folder, or demo.")
@click.option("--host", metavar="H", help="Address to listen on.")
@click.option("--port", metavar="P", help="TCP port; 0 takes a free one.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--ctx", metavar="N|auto", help="Window of a conversation, tokens.")
@click.option("--slots", metavar="N|auto", help="Requests that run at the same time.")
@click.option("--prefix-cache", metavar="DIR", help="Folder where computed prompts survive a restart.")
@click.option("--preset", metavar="NAME", help="agentic: sampler and thinking that coding agents need.")
@click.option("--temp", metavar="T", help="Temperature where a request does not say; 0 is greedy.")
@click.option("--top-p", metavar="P", help="Likewise.")
@click.option("--top-k", metavar="K", help="Likewise.")
@click.option("--min-p", metavar="P", help="Likewise.")
@click.option("--think/--no-think", default=None, help="Whether the model thinks where a request does not say.")
@click.option("--think-budget", metavar="N|auto|none", help="Most reasoning tokens of an answer.")
@click.option("--request-think/--no-request-think", default=None, help="Obey the thinking fields of requests.")
@click.option("--api-key", metavar="KEY", multiple=True, help="A key that clients must send; may be repeated.")
@click.option("--api-key-file", metavar="FILE", help="File with one key a line.")
@click.option("--capture", metavar="FOLDER", help="Keep every request there. Holds prompts.")
@click.option("--verify-weights", is_flag=True, default=None, help="Remember a checksum of what is in device memory; /health?verify=1 compares.")
def serve(model: str | None, host: str | None, port: str | None, backend: str | None, ctx: str | None,
          slots: str | None, prefix_cache: str | None, preset: str | None, temp: str | None, top_p: str | None, top_k: str | None,
          min_p: str | None, think: bool | None, think_budget: str | None, request_think: bool | None,
          api_key: tuple[str, ...], api_key_file: str | None, capture: str | None,
          verify_weights: bool | None) -> int | None:
    """Serve a model over HTTP until stopped.

    What no flag says comes from the environment and config.toml; see q27app config show --origin.
    """
    from q27app.config import load_config
    from q27app.daemon.serve import serve as serve_daemon

    return serve_daemon(load_config({
        "model.path": model, "server.host": host, "server.port": port, "model.backend": backend, "model.context": ctx,
        "model.slots": slots, "sampling.preset": preset, "sampling.temperature": temp, "sampling.top_p": top_p,
        "sampling.top_k": top_k, "sampling.min_p": min_p,
        "reasoning.default": None if think is None else "on" if think else "off", "reasoning.budget": think_budget,
        "reasoning.request_thinking": request_think, "server.api_keys": api_key or None,
        "server.api_key_file": api_key_file, "server.capture": capture, "kernels.verify_weights": verify_weights, "cache.directory": prefix_cache}))


@click.command()
@click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "cuda", "numpy"]),
              help="Where to compute.")
def demo(backend: str) -> None:
    """Ask the bundled model something, to see that everything works.

    Starts the daemon on a free loopback port, asks over HTTP, streams the answer, prints its speed, stops the daemon. No
    configuration is read, so that the demo works the same everywhere.
    """
    with tempfile.TemporaryDirectory(prefix="q27app-demo-") as folder:
        log = Path(folder) / "log"
        port = _free_port()
        with log.open("wb") as log_file:
            daemon = _start(Path(folder), port, backend, log_file)
        try:
            click.echo(f"Starting the daemon with the demo model on http://127.0.0.1:{port} ...", err=True)
            _wait_ready(daemon, port, log)
            click.echo(f"> {QUESTION}", err=True)
            _ask(port, log)
        finally:
            _stop(daemon)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(folder: Path, port: int, backend: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    from q27app.config import child_environment, variable

    (folder / "config.toml").write_text("")
    package_folder = str(Path(__file__).resolve().parents[1])  # this very package, whatever the working directory holds
    command = [sys.executable, "-P", "-m", "q27app", "serve", "--model", "demo", "--host", "127.0.0.1", "--port", str(port),
               "--backend", backend]
    search_path = os.pathsep.join(filter(None, [package_folder, variable("PYTHONPATH")]))
    environment = child_environment({"Q27APP_CONFIG": str(folder / "config.toml"), "NOTIFY_SOCKET": "",
                                     "PYTHONPATH": search_path}, settings=False)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def _wait_ready(daemon: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        if daemon.poll() is not None:
            raise _DaemonEnded(daemon.returncode, log)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise Unreachable(f"the demo daemon was not ready after {START_LIMIT_S:.0f} s. Its last words:\n{_tail(log)}")


class _DaemonEnded(Q27Error):
    """The demo's daemon stopped by itself; leaves with the same exit code."""

    def __init__(self, code: int, log: Path) -> None:
        super().__init__(f"the demo daemon ended with exit code {code}. Its last words:\n{_tail(log)}")
        self.exit_code = code if 0 < code < 128 else EngineDied.exit_code


def _tail(log: Path, num_lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def _ask(port: int, log: Path) -> None:
    """Stream one answer to standard output, then its speed."""
    started = time.monotonic()
    first_at: float | None = None
    usage: dict[str, int] = {}
    for event in _stream(port, {"model": "demo", "stream": True, "stream_options": {"include_usage": True},
                                "messages": [{"role": "user", "content": QUESTION}]}, log):
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                first_at = first_at or time.monotonic()
                click.echo(text, nl=False)
    click.echo()
    if first_at is None:
        raise EngineDied("the demo daemon answered with no text.", "Run q27app serve --model demo and look at its log.")
    ended = time.monotonic()
    count = usage.get("completion_tokens", 0)
    rate = (count - 1) / max(ended - first_at, 1e-9)
    click.echo(f"{count} tokens, {rate:.1f} tokens/s, first after {(first_at - started) * 1e3:.0f} ms.")


def _stream(port: int, body: dict, log: Path) -> Iterator[dict]:
    """The data objects of a streamed chat completion. Raises Q27Error with the daemon's answer if it is no stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineDied(f"the demo daemon answered {response.status}: {response.read(2000)!r}")
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise EngineDied(f"the demo daemon broke off: {event['error']}")
                yield event
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"the demo daemon broke off: {error!r}. Its last words:\n{_tail(log)}") from error
    finally:
        connection.close()


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
