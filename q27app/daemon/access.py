"""Who may ask: keys, Host, Origin, media type, body size. No CORS headers anywhere: pages of other sites get nothing.

Checks run before routing, so 401 wins over 404 and over reading the body. Keys are compared as digests, each against
all, in constant time; none is ever logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from q27app.daemon.failures import BrokenBody, RequestTimeout, UnsupportedMediaType
from q27app.daemon.fields import decode_body
from q27app.errors import Forbidden, PayloadTooLarge, Unauthorized, UsageError, why

if TYPE_CHECKING:
    from aiohttp import web

    from q27app.config import Config

MAX_KEY_FILE_BYTES = 1 << 20
BODY_TIMEOUT_S = 120.0
LARGE_BODY_BYTES = 1 << 18
"""Larger bodies are decoded in the executor."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Keys:
    """Digests of the keys that open the API and the /admin routes. Empty: no key is needed."""

    api: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    @property
    def are_needed(self) -> bool:
        return bool(self.api or self.admin)


def load_keys(config: Config) -> Keys:
    """The keys of the configuration and of its key file. Raises UsageError for a file that cannot be used."""
    server = config.server
    keys = [*server.api_keys, *(_read_key_file(server.api_key_file) if server.api_key_file else [])]
    if any(not key.strip() for key in [*keys, *server.admin_keys]):
        raise UsageError("an API key is empty.", "Give a key of at least one character, or none at all.")
    return Keys(tuple(map(_digest, keys)), tuple(map(_digest, server.admin_keys)))


def _read_key_file(name: str) -> list[str]:
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise UsageError(
                f"{path}: others can read this key file (mode {stat.S_IMODE(mode):04o}).", f"chmod 600 {path}"
            )
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the key file cannot be read: {why(error)}.", "One key a line, in UTF-8.") from error
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise UsageError(
            f"{path}: the key file holds no key.", "One key a line; blank lines and # comments are skipped."
        )
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()


def check_exposure(config: Config, keys: Keys) -> None:
    """Raises UsageError for a listening address that others can reach without any key, unless that was asked for."""
    host = config.server.host
    if not is_loopback(host) and not keys.are_needed and not config.server.allow_open_bind:
        raise UsageError(
            f"server.host is {host!r}: other machines could use this daemon without any key.",
            "Set server.api_key_file, listen on 127.0.0.1, or allow it with server.allow_open_bind.",
        )


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_browser(request: web.Request, config: Config) -> None:
    """Host, Origin and Sec-Fetch-Site: what a page of another site cannot fake. Raises Forbidden."""
    hosts = request.headers.getall("Host", [])
    name, port = _split_host(hosts[0]) if len(hosts) == 1 else ("", None)
    server = config.server
    if is_loopback(server.host) or server.allowed_hosts:
        allowed = {
            *_LOOPBACK_NAMES,
            server.host.lower().strip("[]"),
            *(item.lower() for item in server.allowed_hosts),
        }
        if name not in allowed:
            raise Forbidden(
                f"the Host header names {name[:100]!r}, which is not this daemon.",
                "Use a loopback address, or add the name to server.allowed_hosts.",
            )
    if request.headers.get("Sec-Fetch-Site", "").strip().lower() == "cross-site":
        raise Forbidden("a page of another site made this request.")
    origin = request.headers.get("Origin")
    if origin is not None and not _is_own_origin(origin, name, port):
        raise Forbidden(f"the Origin {origin[:100]!r} is not this daemon.")


def _split_host(value: str) -> tuple[str, int | None]:
    """Name without brackets and trailing dot, in lower case, and port; ("", None) if it is neither."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::(\d{1,5}))?", value.strip())
    if match is None:
        return "", None
    name = match.group(1).lower().strip("[]").rstrip(".")
    return name, int(match.group(2)) if match.group(2) else None


def _is_own_origin(origin: str, name: str, port: int | None) -> bool:
    try:
        parts = urlsplit(origin)
        default = {"http": 80, "https": 443}.get(parts.scheme)
        return (
            default is not None
            and (parts.hostname or "").rstrip(".") == name
            and (parts.port or default) == (port or default)
        )
    except ValueError:
        return False


def check_key(request: web.Request, keys: Keys) -> None:
    """/health is open to all; /admin needs an admin key where there are any. Raises Unauthorized or Forbidden."""
    path = request.path
    is_admin = path == "/admin" or path.startswith("/admin/")
    if not keys.are_needed:
        if is_admin and not is_loopback(request.remote or ""):
            raise Forbidden(
                "/admin routes are open to this machine only.", "Set server.admin_keys to use them remotely."
            )
        return
    if path == "/health":
        return
    given = _digest(_credential(request)) if _credential(request) else b""
    is_admin_key, is_api_key = _matches(given, keys.admin), _matches(given, keys.api)
    if not (is_admin_key or is_api_key):
        raise Unauthorized("an API key is needed.", "Send it as Authorization: Bearer KEY or x-api-key: KEY.")
    if is_admin and keys.admin and not is_admin_key:
        raise Forbidden("this key does not open /admin routes.", "Use one of server.admin_keys.")


def _matches(given: bytes, known: tuple[bytes, ...]) -> bool:
    found = False
    for digest in known:
        found |= hmac.compare_digest(given, digest)
    return found


def _credential(request: web.Request) -> str:
    key = request.headers.get("x-api-key", "").strip()
    if key:
        return key
    match = re.fullmatch(r"bearer[ \t]+(.+)", request.headers.get("Authorization", "").strip(), re.IGNORECASE)
    return match.group(1).strip() if match else ""


def check_media_type(request: web.Request) -> None:
    """A POST must say that it is JSON: no form of another site can. Raises UnsupportedMediaType."""
    if request.method == "POST":
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise UnsupportedMediaType(f"Content-Type is {kind[:80]!r}, expected application/json.")


async def read_object(request: web.Request, limit: int, executor: Any, may_be_empty: bool = False) -> dict[str, Any]:
    """The JSON object of a body of at most `limit` bytes, unpacked. Raises PayloadTooLarge or BadRequest."""
    from aiohttp.web import HTTPRequestEntityTooLarge, RequestPayloadError

    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError as error:
        raise RequestTimeout(f"the request body did not arrive within {BODY_TIMEOUT_S:.0f} s.") from error
    except HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except RequestPayloadError as error:
        raise BrokenBody("the request body cannot be read: it is not what its Content-Encoding says, or ends early.",
                         "Send it whole, as it is or as gzip or deflate.") from error
    if may_be_empty and not raw.strip():
        return {}
    if len(raw) <= LARGE_BODY_BYTES:
        return decode_body(raw)
    return await asyncio.get_running_loop().run_in_executor(executor, decode_body, raw)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the request body is larger than {limit >> 20} MiB.", "server.body_limit_mb sets the limit."
    )


def describe_client(request: web.Request) -> str:
    """Program and address, for logs: a bounded, harmless string."""
    agent = re.match(r"[A-Za-z0-9._-]{1,40}", request.headers.get("User-Agent", ""))
    return f"{agent.group(0) if agent else '-'}@{request.remote or 'local'}"
