"""Records which functions of the project run in a process, and in which classes' objects they are given a request.

bench/request_trace.py puts this folder on PYTHONPATH, so every process of its cluster imports this module at its start.
A thread listens at a socket in the folder LORAPLEX_TRACE: `window NAME` begins a window, `dump` answers with JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

# Maximum number of elements of a sequence, or fields of an object, that are looked at.
_LOOKS = 64


class _Recorder:
    """Keeps what has run, by window. An object is a form of the request when one of its fields has a mark.

    Marks are the request's seed, its prompt's text and ids, and ids of its answer.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._root: str = settings["root"]
        self._paths = tuple(f"{self._root}/{name}/" for name in settings["packages"])
        self._packages = {*settings["packages"], "loraplex", "loraplex_client"}
        self._seed: int = settings["seed"]
        self._prompt: str = settings["prompt"]
        self._prompt_ids, self._answer_ids = list(settings["prompt_ids"]), list(settings["answer_ids"])
        self._looks_for_forms = False
        self._calls = Counter[str]()
        self.windows: dict[str, Counter[str]] = {}
        self.forms: dict[str, str] = {}

    def begin(self, window: str) -> None:
        """Count calls in this window from now on; forms are looked for in the request's."""
        self._calls = self.windows.setdefault(window, Counter())
        self._looks_for_forms = window == "request"

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call, or the value that is returned, of a function of the project (see sys.setprofile)."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._paths):
            return
        function = f"{code.co_filename[len(self._root) + 1 :]}:{code.co_qualname}"
        if event == "call":
            self._calls[function] += 1
        if not self._looks_for_forms:
            return
        if event == "return":
            self._note(argument, function)
        else:
            values = frame.f_locals
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._note(values.get(name), function)

    def _note(self, value: object, function: str, depth: int = 0) -> None:
        """Record the class of an object, or of those of a sequence, if it has a mark."""
        if isinstance(value, list | tuple):
            for one in value[:_LOOKS] if depth < 2 else ():
                if not isinstance(one, int | str | float | bytes):
                    self._note(one, function, depth + 1)
            return
        cls = type(value)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, type) or name in self.forms or cls.__module__.partition(".")[0] not in self._packages:
            return
        with contextlib.suppress(Exception):
            fields = _fields(value)
            if any(self._is_mark(*one) for one in fields):
                self.forms[name] = function
            for _, one in fields if hasattr(cls, "DESCRIPTOR") else ():  # functions get a message's parts in the whole
                if hasattr(type(one), "DESCRIPTOR") and depth < 2:
                    self._note(one, function, depth + 1)

    def _is_mark(self, field: str, value: Any) -> bool:
        if isinstance(value, bool):
            return False
        if isinstance(value, int):
            # Not every number: counts of tokens are small too.
            return value == self._seed or (field.endswith(("token", "token_id")) and value in self._answer_ids)
        if isinstance(value, str):
            return self._prompt in value
        if isinstance(value, list | tuple) or type(value).__name__.startswith("Repeated"):
            ids = list(value)
            return ids[: len(self._prompt_ids)] == self._prompt_ids or self._is_of_answer(field, ids)
        return False

    def _is_of_answer(self, field: str, ids: list[Any]) -> bool:
        """Tell whether ids are consecutive ones of the answer: several, or one where the field's name says so."""
        count = len(ids)
        runs = (self._answer_ids[at : at + count] for at in range(len(self._answer_ids) - count + 1))
        return (count > 1 or (count == 1 and "ids" in field)) and ids in runs


def _fields(value: Any) -> list[tuple[str, Any]]:
    if hasattr(type(value), "DESCRIPTOR"):
        return [(field.name, one) for field, one in value.ListFields()]
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
    fields = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
    return list(fields.items())[:_LOOKS]


def _serve(listening: socket.socket, recorder: _Recorder) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                word, _, name = connection.recv(1024).decode().partition(" ")
                if word == "window":
                    recorder.begin(name)
                else:
                    dump = {"argv": sys.argv, "windows": recorder.windows, "forms": recorder.forms}
                    connection.sendall(json.dumps(dump).encode())


if os.environ.get("LORAPLEX_TRACE"):
    _recorder = _Recorder(json.loads(os.environ["LORAPLEX_TRACE_SETTINGS"]))
    _listening = socket.socket(socket.AF_UNIX)
    _listening.bind(f"{os.environ['LORAPLEX_TRACE']}/{os.getpid()}")
    _listening.listen()
    threading.Thread(target=_serve, args=(_listening, _recorder), daemon=True).start()
    threading.setprofile(_recorder.profile)
    sys.setprofile(_recorder.profile)
