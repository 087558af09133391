"""Proves that grammars compile, in a child process with limits of time and memory that may be killed.

A grammar that takes too long, too much memory, or crashes its compiler, kills the child alone; another child is started
for the next one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import grammar_digest

# Maximum processor time in seconds, and bytes of address space, that the proof of a grammar takes.
CPU_S = 0.6
MEMORY_BYTES = 1 << 30
# Timeout in seconds for an answer of the child: on a busy machine its processor time takes longer.
WALL_S = 30.0
# Maximum number of grammars whose proofs are kept; one takes some 200 bytes.
_CACHED_PROOFS = 4_096


class ProverBusyError(Exception):
    """The child has not answered in time, though it may have had no processor time: the same call may succeed."""


class Prover:
    """Proves the grammars of one vocabulary, given by its size and its special tokens. May be used by many threads."""

    def __init__(self, size: int, special: Mapping[int, str], *, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        self._vocabulary = {"size": size, "special": {str(token_id): text for token_id, text in special.items()}}
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        # Path and error by digest, the first first; an empty error: proven.
        self._results: dict[str, tuple[str, str]] = {}

    def known(self, grammar: str, tenant: str = "") -> bool:
        """Tell whether `prove` returns at once."""
        return grammar_digest(grammar, tenant) in self._results

    def prove(self, grammar: str, path: str = "format", tenant: str = "") -> None:
        """Raise GrammarError for a grammar that cannot be used, ProverBusyError where that is not known yet."""
        digest = grammar_digest(grammar, tenant)
        # Without the lock, which a thread with another grammar may hold for long.
        result = self._results.get(digest)
        if result is None:
            with self._lock:
                result = self._results.get(digest) or self._ask(grammar)
                self._results[digest] = result
                if len(self._results) > _CACHED_PROOFS:
                    del self._results[next(iter(self._results))]
        if result[1]:
            raise GrammarError(path + result[0], result[1])

    def forget(self) -> int:
        """Forget the proofs, whose errors may quote a grammar; returns how many there were."""
        forgotten, self._results = self._results, {}
        return len(forgotten)

    def close(self) -> None:
        """End the child; a proof that is under way fails."""
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()

    def _ask(self, grammar: str) -> tuple[str, str]:
        child = self._started()
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the child has no pipes")
        try:
            child.stdin.write(json.dumps({**self._vocabulary, "grammar": grammar}).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            return self._died(child)
        answers = select.poll()  # unlike select(), it takes descriptors from 1,024 up
        answers.register(child.stdout, select.POLLIN)
        if not answers.poll(self._wall_s * 1e3):
            self._end()
            raise ProverBusyError
        line = child.stdout.readline()
        if not line.endswith(b"\n"):
            return self._died(child)
        answer = json.loads(line)
        return (answer["path"], answer["error"]) if answer else ("", "")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            # -P: a folder named grammars in the working directory must not take the place of this one.
            command = (
                sys.executable,
                "-P",
                "-m",
                "loraplex.contracts.grammars.prove",
                str(MEMORY_BYTES),
                str(self._cpu_s),
            )
            # Numerical libraries start a thread for each core, which reserves address space.
            environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        return self._child

    def _died(self, child: subprocess.Popen[bytes]) -> tuple[str, str]:
        """Return the error of the grammar that killed the child."""
        code = child.wait()
        self._end()
        if code == -signal.SIGPROF:
            return "", f"takes more than {self._cpu_s:g} s to compile"
        if code == 1:
            return "", "takes too much memory to compile"
        return "", "cannot be compiled: too large, or too deeply nested"

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
