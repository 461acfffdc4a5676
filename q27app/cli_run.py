"""Commands that run the daemon: serve, demo."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from q27app.errors import EngineDied, Unreachable

if TYPE_CHECKING:
    from q27app.child_daemon import ChildDaemon

QUESTIONS = ("What are you, and does everything work?", "Which port does the daemon use?", "What is 27 + 15?")


@click.command()
@click.option("--model", "-m", metavar="M", help="Path, name in the models folder, or demo.")
@click.option("--host", metavar="H", help="Address to listen on.")
@click.option("--port", metavar="P", help="TCP port; 0 takes a free one.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--ctx", metavar="N|auto", help="Window of a conversation, tokens.")
@click.option("--slots", metavar="N|auto", help="Requests that run at the same time.")
@click.option("--kv", metavar="F|auto", help="Format of the attention cache.")
@click.option("--embed", metavar="auto|device|host", help="Where the embedding table lies.")
@click.option("--prefix-cache", metavar="DIR", help="Folder where computed prompts survive a restart.")
@click.option("--preset", metavar="NAME", help="agentic: for coding agents; card, card-coding, card-instruct: the model card's; reference: the plainest.")
@click.option("--fast-head", is_flag=True, default=None, help="In a tier with two heads let the smaller one decide.")
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
          slots: str | None, kv: str | None, embed: str | None, prefix_cache: str | None, preset: str | None,
          fast_head: bool | None, temp: str | None, top_p: str | None, top_k: str | None,
          min_p: str | None, think: bool | None, think_budget: str | None, request_think: bool | None,
          api_key: tuple[str, ...], api_key_file: str | None, capture: str | None,
          verify_weights: bool | None) -> int | None:
    """Serve a model over HTTP until stopped.

    What no flag says comes from the environment and config.toml; see q27app config show --origin.
    """
    from q27app.config import load_config
    from q27app.daemon.serve import serve as serve_daemon

    flags = {
        "model.path": model, "server.host": host, "server.port": port, "model.backend": backend, "model.context": ctx,
        "model.slots": slots, "model.kv": kv, "model.embed": embed, "sampling.preset": preset,
        "model.fast_head": fast_head, "sampling.temperature": temp, "sampling.top_p": top_p,
        "sampling.top_k": top_k, "sampling.min_p": min_p,
        "reasoning.default": None if think is None else "on" if think else "off", "reasoning.budget": think_budget,
        "reasoning.request_thinking": request_think, "server.api_keys": api_key or None,
        "server.api_key_file": api_key_file, "server.capture": capture, "kernels.verify_weights": verify_weights, "cache.directory": prefix_cache}
    return serve_daemon(load_config(flags), None, lambda: load_config(flags))


@click.command()
@click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "cuda", "numpy"]),
              help="Where to compute.")
def demo(backend: str) -> None:
    """Ask the bundled model three questions, to see that everything works.

    Starts the daemon on a free loopback port, asks over HTTP, streams the answers, prints their speed, stops the daemon. No
    configuration is read, so that the demo works the same everywhere.
    """
    from q27app.child_daemon import ChildDaemon

    daemon = ChildDaemon({"model.path": "demo", "model.backend": backend})
    click.echo(f"Starting the daemon with the demo model on {daemon.url} ...", err=True)
    with daemon:
        answers = []
        for question in QUESTIONS:
            click.echo(f"> {question}", err=True)
            answers.append(_ask(daemon, question))
    count, seconds = sum(answer[0] for answer in answers), sum(answer[2] for answer in answers)
    rate = (count - len(answers)) / max(seconds, 1e-9)
    click.echo(f"{count} tokens, {rate:.1f} tokens/s, first after {answers[0][1] * 1e3:.0f} ms.")


def _ask(daemon: ChildDaemon, question: str) -> tuple[int, float, float]:
    """Stream one answer to standard output. Returns its tokens, seconds until the first text, and seconds from there on."""
    started = time.monotonic()
    first_at: float | None = None
    usage: dict[str, int] = {}
    for event in _stream(daemon, {"model": "demo", "stream": True, "stream_options": {"include_usage": True},
                                "temperature": 0, "messages": [{"role": "user", "content": question}]}):
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                first_at = first_at or time.monotonic()
                click.echo(text, nl=False)
    click.echo()
    if first_at is None:
        raise EngineDied("the demo daemon answered with no text.", "Run q27app serve --model demo and look at its log.")
    return usage.get("completion_tokens", 0), first_at - started, time.monotonic() - first_at


def _stream(daemon: ChildDaemon, body: dict) -> Iterator[dict]:
    """The data objects of a streamed chat completion. Raises Q27Error with the daemon's answer if it is no stream."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
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
        raise Unreachable(f"the demo daemon broke off: {error!r}. Its last words:\n{daemon.last_words()}") from error
    finally:
        connection.close()

