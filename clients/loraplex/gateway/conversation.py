"""A chat made of another protocol's messages, so that errors name the places that these came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loraplex.gateway.errors import HttpError, http_error
from loraplex_client import InvalidRequestError, LoraplexError, NotImplementedByServerError

# Maximum characters of a session's id at the routers; what begins alike beyond them is one session.
SESSION_CHARACTERS = 256


@dataclass
class ChatBuilder:
    """The messages of a chat, and the places in the request that these and the tools come from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)

    def add(self, origin: str, **message: Any) -> None:
        """Add a message."""
        self.messages.append(message)
        self.origins.append(origin)

    @contextmanager
    def naming_origins(self) -> Iterator[None]:
        """Let an error of the cluster name fields by their places in the request. Raises HttpError, LoraplexError."""
        try:
            yield
        except (InvalidRequestError, NotImplementedByServerError) as error:
            raise self._renamed(error) from error

    def _renamed(self, error: LoraplexError) -> HttpError:
        failure = http_error(error)
        for name, origins in (("messages", self.origins), ("tools", self.tools)):
            if origins and (match := re.match(rf"{name}\[(\d+)\]", failure.field)):
                origin = origins[int(match[1])]
                failure.message = failure.message.replace(match[0], origin, 1)
                failure.field = origin + failure.field[match.end() :]
                break
        return failure
