"""The one exception family. Every error a user, a file or a network peer can cause is a `Q27Error`.

An error says what happened with the values, what was expected and what to do (`hint`). The command line prints
`message` and `hint` and leaves with `exit_code`; the daemon answers with `http_status` and `code`. Anything that is
not a `Q27Error` is a mistake of ours and leaves with `EXIT_INTERNAL`.

Exit codes (documented in the README):

    0    success
    1    the operation failed for a reason named in the message
    2    wrong usage or configuration; starting again will not help
    3    a model, tokenizer or cache file is damaged or of a kind that cannot be used
    4    the GPU, its driver or its toolkit cannot be used
    5    the model does not fit into memory
    6    the address is in use or cannot be bound
    7    the daemon is not reachable
    70   internal error
    75   the engine died; starting again may help
    130  interrupted
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_FILE = 3
EXIT_GPU = 4
EXIT_MEMORY = 5
EXIT_ADDRESS = 6
EXIT_UNREACHABLE = 7
EXIT_INTERNAL = 70
EXIT_ENGINE_DIED = 75
EXIT_INTERRUPTED = 130


class Q27Error(Exception):
    """Base of the family.

    message: one sentence or more, with the values that were found and what was expected.
    hint: what to do about it, or "".
    """

    http_status = 500
    code = "internal_error"
    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


def why(error: Exception) -> str:
    """What an error says, without the number and the path that an OSError puts around it."""
    return getattr(error, "strerror", None) or str(error)


class UsageError(Q27Error):
    """A flag, an environment variable or a configuration value cannot be used."""

    http_status = 400
    code = "usage_error"
    exit_code = EXIT_USAGE


class FileFormatError(Q27Error):
    """A file is damaged, lies about itself, or is of a kind that this program does not read."""

    code = "file_format_error"
    exit_code = EXIT_FILE


class ModelError(FileFormatError):
    """A checkpoint is readable but is not a model that this program can run."""

    code = "model_error"


class GpuError(Q27Error):
    """The card, its driver, the toolkit or a kernel cannot be used."""

    http_status = 503
    code = "gpu_error"
    exit_code = EXIT_GPU


class OutOfMemory(Q27Error):
    """Something does not fit; `message` carries needed and free bytes."""

    http_status = 503
    code = "out_of_memory"
    exit_code = EXIT_MEMORY


def no_host_memory(what: str, error: MemoryError) -> OutOfMemory:
    """The system gave no memory for something that one request needs; what: names it, with its size."""
    found = f": {error}" if str(error) else ""
    return OutOfMemory(f"host memory does not hold {what}{found}.", "Ask for less, or close other programs and try again.")


class AddressInUse(Q27Error):
    """The listening address cannot be bound."""

    code = "address_in_use"
    exit_code = EXIT_ADDRESS


class Unreachable(Q27Error):
    """No daemon answers at the address."""

    code = "unreachable"
    exit_code = EXIT_UNREACHABLE


class EngineDied(Q27Error):
    """The engine thread ended; every request that was running or waiting ends with this."""

    http_status = 503
    code = "engine_died"
    exit_code = EXIT_ENGINE_DIED


class BadRequest(Q27Error):
    """A client's request cannot be served as it stands. `param` names the field, if one is to blame."""

    http_status = 400
    code = "invalid_request"

    def __init__(self, message: str, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param


class ContextTooLong(BadRequest):
    """The prompt does not fit the window: `num_tokens` against `max_tokens`."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Unauthorized(Q27Error):
    """A key is configured and the request carries none, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class Forbidden(Q27Error):
    """The request is refused whoever sends it: foreign origin, wrong Host, or a missing admin key."""

    http_status = 403
    code = "forbidden"


class NotFound(Q27Error):
    """No such route, model or request."""

    http_status = 404
    code = "not_found"


class PayloadTooLarge(BadRequest):
    """The body is over the limit."""

    http_status = 413
    code = "payload_too_large"


class Overloaded(Q27Error):
    """The queue is full, the model is loading or unloaded, or the daemon is draining; `retry_after_s` says when."""

    http_status = 503
    code = "overloaded"

    def __init__(self, message: str, hint: str = "", retry_after_s: int = 5) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s
