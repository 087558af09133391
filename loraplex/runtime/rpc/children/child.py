"""The side of a child process that works on hostile data: requests come in on stdin, answers go out on stdout.

A message is 4 bytes of length and JSON. The process has limited memory and opens few files or none. The kernel kills it
after too much work on one request: no handler would run while C code works on a number of a million digits.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

Json = dict[str, Any]
LENGTH = struct.Struct(">I")
# Key of an answer after which the process ends, such as one after it ran out of memory.
LAST = "last"


def serve(
    answer: Callable[[Mapping[str, Any]], Json],
    *,
    cpu_s: Callable[[Mapping[str, Any]], float],
    memory_bytes: int,
    files: int = 3,
    nice: int = 10,
) -> None:
    """Answer requests until stdin ends.

    `cpu_s` says how many seconds of processor time a request may take, `files` how many descriptors may be open. An
    `answer` raises nothing, and is JSON. `nice`: how far the process stands back for others on a busy machine.
    """
    os.nice(nice)
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, files)):
        resource.setrlimit(kind, (limit, limit))
    for request in _requests(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, cpu_s(request))
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Half of a surrogate pair is no character of UTF-8: it reads as a question mark.
        data = json.dumps(reply, ensure_ascii=False).encode(errors="replace")
        sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
        sys.stdout.buffer.flush()
        if LAST in reply:
            return


def _requests(stdin: BinaryIO) -> Iterator[Json]:
    while head := stdin.read(LENGTH.size):
        yield json.loads(stdin.read(LENGTH.unpack(head)[0]))
