"""Models and adapters that are given as GGUF files: a worker process converts them. Adapters of MLX are converted here.

A model is imported once, into a cache, by the digest of its bytes; an adapter each time, since it is small.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.terminal import CommandError, err

# The variable that names the cache's folder, which is otherwise in the user's own cache (XDG_CACHE_HOME).
CACHE_VARIABLE = "LORAPLEX_CACHE_DIR"
# Raised when an import writes something else for the same file, so that the cache's directories are made again.
_VERSION = 1


def worker_command(command: str, flags: Mapping[str, object], *words: str) -> list[str]:
    """Return `loraplex worker COMMAND --flag=value ...`."""
    words = (command, *(f"--{name}={flags[name]}" for name in flags), *words)
    return [sys.executable, "-P", "-m", "loraplex", "worker", *words]


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.gguf", help="A model; of a split one any part, with the others beside it.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New directory for the model.")],
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Dtype of the weights: bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a GGUF file's model as a transformers directory: weights, configuration, tokenizer and chat template.

    [bold]loraplex models import ./SmolLM2-135M-Instruct.Q4_1.gguf ./SmolLM2-135M-Instruct[/]
    """
    run_to_its_end("import-gguf", {"file": file, "out": directory, "dtype": dtype})


def local_model(path: str, name: str = "", dtype: str = "") -> tuple[str, str]:
    """Return a model's directory and name; a GGUF file is imported at its first use. Raises CommandError, OSError.

    `dtype` is what the model computes in. The weights are written in bfloat16, or in float32 if it has more digits.
    """
    from loraplex.checkpoints.gguf_names import model_name, parts_of
    from loraplex.contracts.artifacts import ArtifactError
    from loraplex.contracts.artifacts.gguf_files import is_gguf

    if not is_gguf(path):
        return path, name
    try:
        parts = parts_of(Path(path))
    except ArtifactError as error:
        raise CommandError(str(error)) from error
    written = "float32" if dtype in ("float32", "float16") else "bfloat16"
    cache = _cache()
    directory = cache / f"{_digest(parts, cache)}-{written}-{_VERSION}"
    if not directory.is_dir():
        with _lock(directory) as lock:
            if not directory.is_dir():  # another process may have imported it meanwhile
                err().print(f"importing {path} into {directory}", markup=False, soft_wrap=True)
                _import(parts[0], directory, written, lock)
    return str(directory), name or model_name(Path(path))


@contextmanager
def peft_directory(path: Path, base: Path | None) -> Iterator[Path]:
    """Yield the directory of a peft adapter: the one given or, of an adapter in GGUF or of MLX, a temporary one.

    One in GGUF needs the directory or the GGUF file of its base model. Raises CommandError, OSError.
    """
    from loraplex.cli.mlx_adapters import is_mlx, write_peft_files
    from loraplex.contracts.artifacts import ArtifactError
    from loraplex_client.adapter_directory import FILES_BESIDE, why_no_adapter

    file, mlx = _adapter_file(path), is_mlx(path)
    if file is None and not mlx:
        if why := why_no_adapter(path):
            raise CommandError(f"{path} {why}")
        yield path
        return
    if file is not None and base is None:
        raise CommandError(
            f"{file} is a GGUF file; give the adapter's base model with --model-dir, a transformers directory or GGUF"
        )
    with tempfile.TemporaryDirectory(prefix="loraplex-adapter-") as directory:
        if mlx:
            try:
                write_peft_files(path, Path(directory))
            except ArtifactError as error:
                raise CommandError(f"{path}: {error}") from error
        else:
            flags = {"file": file, "base": local_model(str(base))[0], "out": directory}
            run_to_its_end("convert-adapter", flags)
        for name in FILES_BESIDE if path.is_dir() else ():
            if (path / name).is_file():
                shutil.copy(path / name, directory)
        yield Path(directory)


def adapter_name(path: Path) -> str:
    """Return the name that an adapter gets without --name: its directory's, or its GGUF file's."""
    from loraplex.checkpoints.gguf_names import model_name
    from loraplex.contracts.artifacts.gguf_files import is_gguf

    return model_name(path) if is_gguf(str(path)) else path.resolve().name


def _adapter_file(path: Path) -> Path | None:
    """Return the GGUF file that is given, or the only one in a directory without a peft adapter."""
    from loraplex.contracts.artifacts.gguf_files import is_gguf
    from loraplex.contracts.artifacts.peft_config import CONFIG_FILE

    if is_gguf(str(path)):
        return path
    files = list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 and not (path / CONFIG_FILE).exists() else None


def _import(file: Path, directory: Path, dtype: str, lock: int) -> None:
    # The worker has the lock too: it ends its import before another one begins, even if this process is killed.
    flags = {"file": file, "out": directory, "dtype": dtype}
    run_to_its_end("import-gguf", flags, "--quiet", descriptors=(lock,))


def run_to_its_end(command: str, flags: Mapping[str, object], *words: str, descriptors: tuple[int, ...] = ()) -> None:
    """Run a worker's command, which prints its own errors. Raises typer.Exit with its exit code.

    After Ctrl-C it has time to remove what it has written; subprocess.run would kill it.
    """
    with subprocess.Popen(worker_command(command, flags, *words), pass_fds=descriptors) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        raise typer.Exit(code)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    default = (Path(home) if home else Path.home() / ".cache") / "loraplex"
    directory = Path(os.environ.get(CACHE_VARIABLE) or default) / "models"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _digest(parts: tuple[Path, ...], cache: Path) -> str:
    """Return the first digits of the digest of all parts, which is computed again when one has changed."""
    from loraplex.contracts.artifacts.names import DIGEST_PREFIX, sha256_file

    key = json.dumps([_file_key(part) for part in parts])
    memory = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.digest"
    with suppress(OSError):
        return memory.read_text(encoding="ascii")
    digests = [sha256_file(part).removeprefix(DIGEST_PREFIX) for part in parts]
    digest = (digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest())[:32]
    unfinished = memory.with_suffix(f".{threading.get_native_id()}")
    unfinished.write_text(digest, encoding="ascii")
    unfinished.rename(memory)
    return digest


def _file_key(path: Path) -> tuple[str, int, int, int]:
    """Return what changes when a file does: its path, inode, size, and the time of its last change in nanoseconds."""
    status = path.stat()
    return str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _lock(directory: Path) -> Iterator[int]:
    """Let one process at a time import into a directory; yields the lock's descriptor."""
    with open(directory.with_suffix(".lock"), "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
