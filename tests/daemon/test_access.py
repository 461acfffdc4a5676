"""Who may ask what: keys, Host, Origin, media type."""

from __future__ import annotations

import http.client
import json
import os

import pytest

from q27app.daemon.access import Keys, check_exposure, load_keys
from q27app.errors import UsageError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def guarded(start, with_server):
    return await start(config=with_server(api_keys=("alpha", "beta"), admin_keys=("root",)))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer alpha"},
        {"Authorization": "bearer \t beta"},
        {"x-api-key": "alpha"},
        {"x-api-key": "root"},
        {"x-api-key": "alpha", "Authorization": "Bearer wrong"},
        {"x-api-key": "", "Authorization": "Bearer beta"},
    ],
)
async def test_a_key_opens_the_api(guarded, headers):
    status, _ = await guarded.post("/v1/chat/completions", CHAT, headers=headers)
    assert status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "alpha"},
        {"Authorization": "Basic alpha"},
        {"Authorization": "Bearer"},
        {"x-api-key": "alph"},
        {"x-api-key": "alphabeta"},
        {"Authorization": "Bearer wrong"},
        {"x-api-key": "wrong", "Authorization": "Bearer alpha"},
        {"x-api-key": "\u00e9"},
    ],
)
async def test_without_a_key_everything_but_health_is_401(guarded, headers):
    for path, dialect in (
        ("/v1/messages", "messages"),
        ("/v1/chat/completions", "openai"),
        ("/v1/none_such", "openai"),
        ("/admin/load", "openai"),
    ):
        async with guarded.session.post(guarded.url + path, json=CHAT, headers=headers) as response:
            assert response.status == 401
            error = (await response.json())["error"]
        if dialect == "messages":
            assert error == {"type": "authentication_error", "message": "invalid x-api-key"}
        else:
            assert error["code"] == "invalid_api_key" and response.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/", "/ready", "/status", "/metrics", "/v1/models", "/admin/events", "/health/x"):
        assert (await guarded.get(path, headers=headers))[0] == 401, path
    assert (await guarded.get("/health", headers=headers))[0] == 200
    assert guarded.engine.requests == []


async def test_401_wins_over_a_body_that_is_no_json(guarded):
    async with guarded.session.post(
        guarded.url + "/v1/messages", data=b"{", headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 401


async def test_admin_needs_an_admin_key_where_there_are_any(guarded):
    for path in ("/admin/load", "/admin/unload", "/admin/cancel/x"):
        assert (await guarded.post(path, {}, headers={"x-api-key": "alpha"}))[0] == 403
    assert (await guarded.get("/admin/events", headers={"x-api-key": "alpha"}))[0] == 403
    assert (await guarded.post("/admin/unload", {"wait": True}, headers={"x-api-key": "root"}))[0] == 200


async def test_without_admin_keys_an_api_key_opens_admin(start, with_server):
    running = await start(config=with_server(api_keys=("alpha",)))
    assert (await running.post("/admin/load", {}, headers={"x-api-key": "alpha"}))[0] == 202
    assert (await running.post("/admin/load", {}))[0] == 401


async def test_keys_are_never_logged(guarded, caplog):
    caplog.set_level("DEBUG")
    await guarded.post("/v1/chat/completions", CHAT, headers={"x-api-key": "alpha"})
    await guarded.post("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer wrong-key"})
    assert "alpha" not in caplog.text and "wrong-key" not in caplog.text
    assert b"alpha" not in json.dumps((await guarded.get("/status", headers={"x-api-key": "root"}))[1]).encode()


async def test_no_prompt_or_answer_is_logged(start, caplog):
    caplog.set_level("DEBUG")
    running = await start(["tangerine"])
    await running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "persimmon"}]})
    await running.quiet()
    line = next(record.getMessage() for record in caplog.records if record.name == "q27app.requests")
    assert "finish=stop" in line and "generated=9" in line and "api=chat" in line
    assert "tangerine" not in caplog.text and "persimmon" not in caplog.text


def raw_request(port: int, headers: dict[str, str], method: str = "GET", path: str = "/") -> int:
    """The status of a request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


async def status_of(running, headers: dict[str, str], **kwargs: str) -> int:
    import asyncio

    return await asyncio.to_thread(raw_request, running.port, headers, **kwargs)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", 200),
        ("localhost", 200),
        ("LOCALHOST.:{port}", 200),
        ("[::1]:{port}", 200),
        ("127.0.0.1:{port}", 200),
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:x", 403),
        ("user@localhost", 403),
        ("192.168.1.5", 403),
        ("box.lan", 403),
        ("", 403),
    ],
)
async def test_host_must_name_this_machine(start, host, expected):
    running = await start()
    assert await status_of(running, {"Host": host.format(port=running.port)}) == expected


async def test_more_hosts_can_be_allowed(start, with_server):
    running = await start(config=with_server(allowed_hosts=("Box.lan",)))
    assert await status_of(running, {"Host": "box.lan:8027"}) == 200
    assert await status_of(running, {"Host": "other.lan"}) == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:{port}"}, 200),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "file://"}, 403),
        ({"Origin": "http://localhost:{port}.evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:{port}"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
async def test_pages_of_other_sites_are_refused(start, headers, expected):
    running = await start()
    filled = {name: value.format(port=running.port) for name, value in headers.items()}
    for method, path in (("GET", "/health"), ("GET", "/v1/models")):
        given = {"Host": f"localhost:{running.port}", **filled}
        assert await status_of(running, given, method=method, path=path) == expected
    async with running.session.post(
        running.url + "/v1/chat/completions", json=CHAT, headers={"Host": f"localhost:{running.port}", **filled}
    ) as response:
        assert response.status == expected
        assert not any(name.lower().startswith("access-control") for name in response.headers)


async def test_no_preflight_succeeds(start):
    running = await start()
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    async with running.session.options(running.url + "/v1/messages", headers=headers) as response:
        assert response.status == 403
    async with running.session.options(running.url + "/v1/messages") as response:
        assert response.status == 405


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
async def test_a_post_must_say_that_it_is_json(start, kind):
    running = await start()
    for path in ("/v1/messages", "/v1/chat/completions", "/admin/unload"):
        async with running.session.post(
            running.url + path, data=json.dumps(CHAT).encode(), headers={"Content-Type": kind}
        ) as response:
            assert response.status == 415
            assert "application/json" in (await response.json())["error"]["message"]
    assert running.engine.state.state == "ready"


async def test_json_with_a_charset_is_json(start):
    running = await start()
    async with running.session.post(
        running.url + "/v1/chat/completions",
        data=json.dumps(CHAT).encode(),
        headers={"Content-Type": "Application/JSON; charset=utf-8"},
    ) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("localhost", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.1.5", True),
        ("box.lan", True),
        ("", True),
    ],
)
def test_an_open_address_without_a_key_is_refused_unless_told(with_server, host, is_open):
    if is_open:
        with pytest.raises(UsageError, match="without any key"):
            check_exposure(with_server(host=host), Keys())
    else:
        check_exposure(with_server(host=host), Keys())
    check_exposure(with_server(host=host, allow_open_bind=True), Keys())
    check_exposure(with_server(host=host), load_keys(with_server(api_keys=("k",))))


def test_a_key_file_is_read_and_must_be_private(tmp_path, with_server):
    path = tmp_path / "keys"
    path.write_text("# mine\n\n  one \ntwo\r\n")
    os.chmod(path, 0o600)
    assert load_keys(with_server(api_key_file=str(path))) == load_keys(with_server(api_keys=("one", "two")))
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        load_keys(with_server(api_key_file=str(path)))


@pytest.mark.parametrize("content", ["", "# only\n", "\n\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path, with_server, content):
    path = tmp_path / "keys"
    path.write_text(content)
    os.chmod(path, 0o600)
    with pytest.raises(UsageError, match="no key"):
        load_keys(with_server(api_key_file=str(path)))
    with pytest.raises(UsageError, match="cannot be read"):
        load_keys(with_server(api_key_file=str(tmp_path / "none")))
    with pytest.raises(UsageError, match="empty"):
        load_keys(with_server(api_keys=(" ",)))
