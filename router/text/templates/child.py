"""Render chat templates as a child process of rpc.children.

Templates are anybody's: Jinja's sandbox keeps them from the interpreter, and this process has no environment, opens no
files after its start, has limited memory, and is killed by the kernel after CPU_S of work on one request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from router.text.templates.environment import Json, RefusedError, Template
from router.text.templates.variables import render
from rpc.children.child import LAST, serve

# Maximum processor time in seconds that one request may take.
CPU_S = 0.5
# Maximum address space in bytes of this process; Jinja and Python need about a tenth.
MEMORY_BYTES = 1 << 29
# Maximum number of compiled templates that are kept.
TEMPLATES_KEPT = 256

_compiled = lru_cache(TEMPLATES_KEPT)(Template)


def _answer(request: Mapping[str, Any]) -> Json:
    """Return the text, or the field to blame and why."""
    try:
        return {"text": render(_compiled(request["source"]), request)}
    except RefusedError as error:
        return {"field": error.field, "error": str(error)}
    except MemoryError:
        return {"field": "chat.messages", "error": "the chat template needs too much memory", LAST: True}
    except RecursionError:
        return {"field": "chat.messages", "error": "the chat template calls itself too deeply"}
    except Exception as error:  # anybody may have written the template: it may raise anything
        return {"field": "chat.messages", "error": f"the chat template refuses them: {_line(error)}"}


def _line(error: Exception) -> str:
    where = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
    return re.sub(r"\s+", " ", str(error))[:300] + where


def main() -> None:
    """Answer requests until stdin ends."""
    with contextlib.suppress(TemplateError):  # imports what Jinja imports late, for an error too
        Template("{{ strftime_now('%Y') }}{{ raise_exception('') }}").render({}, 0.0, 100)
    serve(_answer, cpu_s=lambda request: CPU_S, memory_bytes=MEMORY_BYTES, nice=5)


if __name__ == "__main__":
    main()
