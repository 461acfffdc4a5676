"""What operators and supervisors read, and the daemon's own client."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from q27app.client import Client, base_url
from q27app.errors import BadRequest, EngineDied, Forbidden, GpuError, NotFound, Q27Error, Unauthorized, Unreachable

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_root_answers_get_and_head(start):
    running = await start()
    assert (await running.get("/"))[0] == 200
    async with running.session.head(running.url + "/") as response:
        assert response.status == 200 and await response.read() == b""


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("ready", 200, 200),
        ("loading", 200, 503),
        ("unloaded", 200, 503),
        ("draining", 200, 503),
        ("failed", 503, 503),
        ("closed", 503, 503),
    ],
)
async def test_health_is_about_life_and_ready_about_answers(start, state, health, ready):
    running = await start()
    running.engine.state.state = state
    running.engine.state.error = EngineDied("the fan stopped.") if state == "failed" else None
    for path, expected in (("/health", health), ("/ready", ready)):
        status, reply = await running.get(path)
        assert status == expected
        assert ("reason" in reply) == (expected != 200)
        if state == "failed":
            assert reply["reason"] == "the fan stopped."


async def test_an_engine_without_a_heartbeat_is_not_healthy(start):
    running = await start()
    running.engine.state.heartbeat_age_s = 500.0
    status, reply = await running.get("/health")
    assert status == 503 and "500 s" in reply["reason"]


async def test_health_compares_the_weights_when_asked(start):
    running = await start()
    running.engine.verifies = {"weights": 3, "seconds": 0.1}
    assert (await running.get("/health"))[1] == {"status": "ok", "state": "ready"}
    for _ in range(3):
        status, reply = await running.get("/health?verify=1")
        assert status == 200 and reply["weights"] == {"equal": True, "weights": 3, "seconds": 0.1}
    assert running.engine.verified == 1, "three questions within a moment are one comparison"


async def test_weights_that_changed_make_the_daemon_unhealthy(start):
    running = await start()
    running.engine.verifies = GpuError("1 of 3 weights in memory are not what was loaded.")
    status, reply = await running.get("/health?verify=1")
    assert status == 503 and reply["weights"]["equal"] is False
    assert "not what was loaded" in reply["reason"]


async def test_health_says_why_the_weights_cannot_be_compared(start):
    running = await start()
    running.engine.verifies = BadRequest("the weights' checksums were not kept.", "Start with --verify-weights.")
    status, reply = await running.get("/health?verify=1")
    assert status == 200 and reply["weights"]["equal"] is None and "--verify-weights" in reply["weights"]["reason"]


async def test_status_lists_requests_in_flight_without_their_text(start):
    running = await start(["a", 600.0, "b"])
    task = asyncio.create_task(
        running.post("/v1/messages", {"messages": [{"role": "user", "content": "persimmon"}], "max_tokens": 5})
    )
    num_generated = 0
    while not num_generated:   # what the engine has said is on its way for a moment
        _, status = await running.get("/status")
        num_generated = sum(request["num_generated"] for request in status["requests"])
    (request,) = status["requests"]
    assert request["api"] == "messages" and request["phase"] == "decode" and request["num_generated"] == 1
    assert status["engine"]["state"] == "ready" and status["model"] == "tiny-1"
    assert "persimmon" not in json.dumps(status)
    task.cancel()
    await running.quiet()


async def test_metrics_count_requests_and_tokens(start):
    running = await start(["abc"])
    for _ in range(2):
        await running.post("/v1/chat/completions", {"messages": MESSAGES})
    await running.post("/v1/chat/completions", {"messages": []})
    async with running.session.get(running.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    assert 'q27app_requests_total{api="chat",outcome="stop"} 2.0' in text
    assert 'q27app_requests_total{api="chat",outcome="error"} 1.0' in text
    assert "q27app_generated_tokens_total 6.0" in text
    prompt = len(running.engine.requests[0].prompt)
    assert f"q27app_prompt_tokens_total {float(2 * prompt)}" in text
    assert f'q27app_prompt_cached_tokens_total{{tier="none"}} {float(prompt - 1)}' in text
    assert 'q27app_engine_state{state="ready"} 1.0' in text
    assert "q27app_engine_steps_total 7.0" in text
    assert "q27app_ttft_seconds_count" in text


PROMISED = """build_info model_info requests_total request_seconds ttft_seconds queue_seconds prompt_tokens_total
prompt_cached_tokens_total generated_tokens_total reasoning_tokens_total prefill_seconds_total decode_seconds_total
spec_drafted_tokens_total spec_accepted_tokens_total slots queue_length kv_tokens tool_calls_total disconnects_total model_loaded
loads_total gpu_memory_bytes gpu_power_watts gpu_temperature_celsius gpu_utilization_ratio engine_heartbeat_seconds""".split()


def exported(text: str) -> set[str]:
    """Names of the families of an exposition, as Prometheus keeps them."""
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


async def exposition(start) -> str:
    running = await start(["abc"])
    await running.post("/v1/chat/completions", {"messages": MESSAGES})
    return running.daemon.metrics.text().decode()


async def test_every_promised_metric_is_exported(start):
    text = await exposition(start)
    assert [name for name in PROMISED if f"q27app_{name}" not in exported(text)] == []
    for sample in ('slots{state="used"}', 'slots{state="free"}', 'kv_tokens{state="used"}', 'kv_tokens{state="capacity"}'):
        assert f"q27app_{sample}" in text
    info = next(line for line in text.splitlines() if line.startswith("q27app_model_info{"))
    assert 'ctx="4096"' in info and "kv=" in info


async def test_the_dashboard_asks_only_for_metrics_that_exist(start):
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    names = {name for expr in asked for name in re.findall(r"q27app_[a-z_]+", expr)}
    known = exported(await exposition(start))
    assert len(names) > 20 and [name for name in sorted(names) if re.sub("_(bucket|sum|count)$", "", name) not in known | {name} & known] == []
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_what_is_kept_off_the_device_is_counted_by_tier():
    from q27app.metrics import Metrics

    tiers = {"host": {"entries": 3, "bytes": 4096, "kept": 9, "used": 2, "evicted": 5}, "disk": {"entries": 7, "bytes": 70, "read": 4}}
    text = Metrics(lambda: {"cache": tiers}).text().decode()
    for sample in ('tier_states{tier="host"} 3.0', 'tier_bytes{tier="host"} 4096.0', 'tier_hits_total{tier="host"} 2.0', 'host_evictions_total 5.0',
                   'tier_states{tier="disk"} 7.0', 'tier_bytes{tier="disk"} 70.0', 'tier_hits_total{tier="disk"} 4.0'):
        assert f"q27app_prefix_{sample}" in text, sample
    assert 'q27app_prefix_tier_states{tier="host"} 0.0' in Metrics(lambda: {}).text().decode()
    assert "q27app_prefix_lost_total 3.0" in Metrics(lambda: {"cache": {"lost": 3}}).text().decode()


def test_drafts_are_counted_by_source_and_depth():
    from q27app.daemon.daemon import _drafts_of
    from q27app.engine.request import DraftCount, RequestStats
    from q27app.metrics import Metrics

    sources = {"mtp": {"drafted": [5, 4], "accepted": [3]}, "suffix": {"drafted": [], "accepted": []}}
    text = Metrics(lambda: {"drafts": {"sources": sources}}).text().decode()
    assert 'q27app_draft_tokens_total{depth="2",source="mtp"} 4.0' in text
    assert 'q27app_draft_accepted_tokens_total{depth="1",source="mtp"} 3.0' in text and 'source="suffix"' not in text
    stats = RequestStats(drafts=(DraftCount("mtp", (5, 4), (3, 0)), DraftCount("suffix", (2,), (2,))))
    assert (_drafts_of(stats), _drafts_of(None), _drafts_of(RequestStats())) == ("mtp:3/9,suffix:2/2", 0, 0)


async def test_cards_and_host_are_in_status_and_metrics(start, monkeypatch):
    from q27app import gpu

    card = gpu.GpuInfo(0, "GPU-1", "Card", (8, 9), 24 << 30, 20 << 30, 4 << 30, 87, 66, None)
    monkeypatch.setattr(gpu, "read_gpus", lambda: (card,))
    running = await start()
    _, status = await running.get("/status")
    assert status["gpus"][0]["name"] == "Card" and status["host"]["num_cpus"] > 0
    async with running.session.get(running.url + "/metrics") as response:
        text = await response.text()
    assert 'q27app_gpu_memory_bytes{gpu="0",kind="free"} 4.294967296e+09' in text
    assert 'q27app_gpu_utilization_ratio{gpu="0"} 0.87' in text
    assert 'q27app_gpu_temperature_celsius{gpu="0"} 66.0' in text
    assert "q27app_gpu_power_watts{" not in text


async def test_two_apps_have_metrics_of_their_own(start):
    first, second = await start(), await start()
    await first.post("/v1/completions", {"prompt": "x"})
    assert b'outcome="stop"' in first.daemon.metrics.text()
    assert b'outcome="stop"' not in second.daemon.metrics.text()


async def test_models_are_read_by_both_kinds_of_clients(start):
    running = await start()
    _, reply = await running.get("/v1/models")
    (entry,) = reply["data"]
    assert reply["object"] == "list" and reply["has_more"] is False
    assert (
        entry["id"] == "tiny-1" and entry["object"] == entry["type"] == "model" and entry["created_at"].endswith("Z")
    )
    status, entry = await running.get("/v1/models/claude-haiku-x")
    assert (status, entry["id"]) == (200, "claude-haiku-x")
    assert (await running.get("/v1/models/some/one"))[1]["id"] == "some/one"


async def test_a_doubled_prefix_is_accepted(start):
    running = await start()
    for path in ("/v1/v1/messages", "/v1/v1/chat/completions"):
        status, _ = await running.post(path, {"messages": MESSAGES, "max_tokens": 5})
        assert status == 200
    assert (await running.get("/v1/v1/models"))[0] == 200
    status, reply = await running.post("/v1/v1/messages", {})
    assert (status, reply["type"]) == (400, "error")


async def test_a_request_without_model_is_answered_with_the_served_name(start):
    running = await start()
    _, reply = await running.post("/v1/chat/completions", {"messages": MESSAGES})
    assert reply["model"] == "tiny-1"


async def test_unload_and_load(start):
    running = await start()
    async with Client(running.url) as client:
        assert await client.unload() == {"state": "unloaded"}
        assert (await client.ready())["reason"] == "the model is unloaded."
        assert await client.load() == {"state": "ready"}
        assert (await client.ready())["ready"] is True


async def test_a_load_that_fails_gives_its_reason(start):
    from concurrent.futures import Future

    running = await start()

    def load() -> Future:
        future: Future = Future()
        future.set_exception(EngineDied("no memory left."))
        return future

    running.engine.load = load
    async with Client(running.url) as client:
        with pytest.raises(Q27Error, match="no memory left"):
            await client.load()
        assert (await client.load(wait=False))["state"] == "ready"


async def test_events_tell_of_requests_and_log_lines(start):
    import logging

    running = await start(["x"])
    logging.getLogger("q27app").setLevel("INFO")
    async with Client(running.url) as client:
        found = []

        async def read() -> None:
            async for event in client.events():
                found.append(event)
                if {"request", "log"} <= {event["event"] for event in found}:
                    return

        task = asyncio.create_task(read())
        await running.post("/v1/completions", {"prompt": "x"})
        async with asyncio.timeout(30):
            await task
    assert [event["event"] for event in found if event["event"] != "log"] == ["request_started", "request"]
    request = next(event for event in found if event["event"] == "request")
    assert request["finish"] == "stop" and request["num_generated"] == 1
    assert [event["number"] for event in found] == sorted(event["number"] for event in found)


async def test_a_listener_that_lags_loses_the_oldest_events_and_is_told():
    from q27app.daemon import hub as hub_module

    hub = hub_module.Hub()
    hub.open()
    listener = hub.listen(0.05)
    assert await anext(listener) is None
    for number in range(hub_module.QUEUE_LENGTH + 50):
        hub.publish("tick", index=number)
    await asyncio.sleep(0)
    first, second = await anext(listener), await anext(listener)
    assert (first["event"], first["count"]) == ("lost", 50)
    assert second["index"] == 50
    hub.close()


async def test_the_client_streams_an_answer(start):
    go_on, pieces = threading.Event(), []
    running = await start(["Hel", go_on, "lo"])
    async with Client(running.url) as client:
        async for piece in client.chat(MESSAGES, max_tokens=50):
            pieces.append(piece)
            if piece.kind == "ping":
                go_on.set()
        assert "".join(piece.text for piece in pieces if piece.kind == "text") == "Hello"
        assert any(piece.kind == "ping" for piece in pieces)
        assert pieces[-1].finish == "stop" and pieces[-1].usage["completion_tokens"] == 5
        assert await client.models() == ["tiny-1"]
        assert (await client.health())["status"] == "ok"
        assert (await client.status())["model"] == "tiny-1"


async def test_the_client_gives_every_failure_as_one_of_ours(start, with_server):
    running = await start(["a", EngineDied("gone.")], config=with_server(api_keys=("k",), admin_keys=("root",)))
    async with Client(running.url) as client:
        with pytest.raises(Unauthorized):
            await client.status()
    async with Client(running.url, "k") as client:
        with pytest.raises(Forbidden):
            await client.load()
        with pytest.raises(BadRequest, match="at least one message"):
            [piece async for piece in client.chat([])]
        with pytest.raises(Q27Error, match="gone"):
            [piece async for piece in client.chat(MESSAGES)]
    async with Client(running.url, "root") as client:
        with pytest.raises(NotFound):
            await client.cancel("no/such")
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable, match="nobody listens there(.|\n)*q27app serve"):
            await client.health()


async def test_leaving_the_clients_stream_cancels_the_request(start):
    running = await start(["a"] + [0.02, "b"] * 500)
    async with Client(running.url) as client:
        stream = client.chat(MESSAGES)
        async for piece in stream:
            if piece.kind == "text":
                break
        await stream.aclose()
        await running.quiet()
    assert len(running.engine.cancels) == 1


def test_the_url_of_an_open_address_is_a_loopback_one():
    assert base_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert base_url("::", 1) == "http://[::1]:1"
    assert base_url("192.168.1.5", 1) == "http://192.168.1.5:1"


async def test_the_event_of_a_request_says_what_was_reused_and_why_not(start):
    from dataclasses import replace

    from q27app.engine.request import RequestStats, Reuse

    running = await start()
    told = []
    running.daemon.hub.publish = lambda kind, **fields: told.append((kind, fields))
    end = running.engine._end
    reuse = Reuse(64, "disk", 500, "diverged", 100, 5, 6)
    running.engine._end = lambda *rest: replace(
        end(*rest), stats=RequestStats(num_prompt=9, num_generated=6, num_steps=2, num_accepted=4, queue_ms=1.234, reuse=reuse))
    await running.post("/v1/completions", {"prompt": "hi", "max_tokens": 3})
    await running.quiet()
    (fields,) = (fields for kind, fields in told if kind == "request")
    wanted = {"accepted_per_step": 2.0, "queue_ms": 1.23, "reuse_from": "disk", "reuse_possible": 500, "reuse_missed": "diverged"}
    assert {name: fields[name] for name in wanted} == wanted
