"""Render chat templates as a child process: requests come in on stdin, answers go out on stdout.

A message is 4 bytes of length and JSON. Templates are anybody's: Jinja's sandbox keeps them from the interpreter, and
this process has no environment, opens no files after its start, has limited memory, and is killed by the kernel after
CPU_S of work on one request.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, BinaryIO

from jinja2 import TemplateError, TemplateSyntaxError

from router.text.templates.environment import Json, RefusedError, Template
from router.text.templates.variables import render

# Maximum processor time in seconds that one request may take.
CPU_S = 0.5
# Maximum address space in bytes of this process; Jinja and Python need about a tenth.
MEMORY_BYTES = 1 << 29
# Maximum number of compiled templates that are kept.
TEMPLATES_KEPT = 256
_LENGTH = struct.Struct(">I")

_compiled = lru_cache(TEMPLATES_KEPT)(Template)


def _answer(request: Mapping[str, Any]) -> Json:
    """Return the text, or the field to blame and why."""
    try:
        return {"text": render(_compiled(request["source"]), request)}
    except RefusedError as error:
        return {"field": error.field, "error": str(error)}
    except MemoryError:
        return {"field": "chat.messages", "error": "the chat template needs too much memory", "last": True}
    except RecursionError:
        return {"field": "chat.messages", "error": "the chat template calls itself too deeply"}
    except Exception as error:  # anybody may have written the template: it may raise anything
        return {"field": "chat.messages", "error": f"the chat template refuses them: {_line(error)}"}


def _line(error: Exception) -> str:
    where = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
    return re.sub(r"\s+", " ", str(error))[:300] + where


def _requests(stdin: BinaryIO) -> Iterator[Json]:
    while head := stdin.read(_LENGTH.size):
        yield json.loads(stdin.read(_LENGTH.unpack(head)[0]))


def _limit_resources() -> None:
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Answer requests until stdin ends."""
    with contextlib.suppress(TemplateError):  # imports what Jinja imports late, for an error too
        Template("{{ strftime_now('%Y') }}{{ raise_exception('') }}").render({}, 0.0, 100)
    _limit_resources()
    for request in _requests(sys.stdin.buffer):
        # The kernel ends the process: no handler would run while C code works on a number of a million digits.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = json.dumps(answer, ensure_ascii=False).encode()
        sys.stdout.buffer.write(_LENGTH.pack(len(data)) + data)
        sys.stdout.buffer.flush()
        if "last" in answer:
            return


if __name__ == "__main__":
    main()
