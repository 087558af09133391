"""Explanations of failed calls: one line each, with a hint what to try next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loraplex_client import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidRequestError,
    LoraplexError,
    NotFoundError,
    NotImplementedByServerError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)

from clients.cli.terminal import CommandError

_FLAGS = {"router": "--router or LORAPLEX_ADDRESS", "store": "--store or LORAPLEX_STORE_ADDRESS"}
_OTHER = {"router": "store or a gateway", "store": "router or a gateway"}
_USUAL = {"router": "127.0.0.1:50051", "store": "127.0.0.1:50052"}
# Parts of gRPC's own messages: of a server without the service, and of a client that meets an HTTP server.
_NO_SUCH_METHOD, _HTTP_SERVER = "Method not found", "http1.x server"
_BAD_INPUT = (
    InvalidRequestError,
    NotFoundError,
    FailedPreconditionError,
    NotImplementedByServerError,
    AlreadyExistsError,
    UnauthenticatedError,
    PermissionDeniedError,
)


@contextmanager
def explained(service: str, address: str) -> Iterator[None]:
    """Turn a LoraplexError of a call to `service` (router, store) at `address` into a CommandError."""
    try:
        yield
    except LoraplexError as error:
        raise explain(error, service, address) from error


def explain(error: LoraplexError, service: str, address: str) -> CommandError:
    """Return the CommandError for a failed call to `service` at `address`."""
    if _is_of_another_kind(error):
        return CommandError(
            f"{address} is not a {service}'s address: a server of another kind answers there, such as a "
            f"{_OTHER[service]}; give the {service}'s address with {_FLAGS[service]}"
        )
    if isinstance(error, UnavailableError) and not error.reason:
        return _no_answer(error, service, address)
    return CommandError(error.message + _next(error), 2 if isinstance(error, _BAD_INPUT) else 1)


def _is_of_another_kind(error: LoraplexError) -> bool:
    """Tell whether the server at the address lacks the service that was called."""
    if isinstance(error, NotImplementedByServerError):
        return _NO_SUCH_METHOD in error.message
    return isinstance(error, UnavailableError) and _HTTP_SERVER in error.message


def _no_answer(error: UnavailableError, service: str, address: str) -> CommandError:
    cause = error.message.rsplit(": ", 1)[-1].rstrip("]")
    if "connect" not in error.message and "resol" not in error.message:
        return CommandError(f"the {service} at {address} went away: {cause}; try again", 1)
    next_step = f"start one with `loraplex up`, or give its address with {_FLAGS[service]}"
    if any("://" in part or ":" not in part for part in address.split(",")):
        next_step = f"{_FLAGS[service]} takes HOST:PORT, such as {_USUAL[service]}"
    return CommandError(f"no {service} answers at {address} ({cause}); {next_step}")


def _next(error: LoraplexError) -> str:
    match error:
        case NotFoundError(kind="adapter" | "revision" | "alias"):
            return "; `loraplex adapters list` lists the adapters"
        case NotFoundError(kind="model" | "base_model" | "base model"):
            return "; `loraplex models list` shows what is registered, `loraplex models push` registers one"
        case UnavailableError(retry_after_s=after) | ResourceExhaustedError(retry_after_s=after) if after:
            return f"; try again in {after:.1f} s"
    return ""
