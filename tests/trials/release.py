"""`make release-check`: a release is built twice with the same bytes, and answers in an environment of its files alone.

    python -m tests.trials.release --python python3.12

Runs the README's commands of "From a release" in a new environment of that Python and in an empty directory, with the
files that `make release` has left in dist/TAG.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.release import CHECKSUMS, IMAGES, ROOT, Source, read_source, release

SECTION = "From a release"
# The README's last command stays up until Ctrl-C, on fixed ports.
RUN = "python -m examples.run"
ONCE = f"{RUN} --once --port 0 --store-port 0"


def commands() -> str:
    """Return the README's commands, of which the last ends by itself."""
    section = (ROOT / "README.md").read_text().split(f"\n## {SECTION}\n")[1].split("\n## ")[0]
    (script,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert script.count(RUN) == 1, script
    return str(script.replace(RUN, ONCE))


def check_bytes(source: Source, place: Path) -> None:
    """Verify the checksums, and compare them with those of another build."""
    subprocess.run(["sha256sum", "--quiet", "-c", CHECKSUMS], cwd=place, check=True)
    with TemporaryDirectory() as folder:
        again = Path(folder) / "again"
        assert release(ROOT, again) == source
        assert (again / CHECKSUMS).read_text() == (place / CHECKSUMS).read_text(), "another build has other bytes"
    assert len(list(place.glob("*.cdx.json"))) == len(IMAGES)
    print(f"{source.tag}: two builds have the same bytes", flush=True)


def check_installation(source: Source, place: Path, folder: Path, python: str) -> None:
    """Run the README's commands in an empty environment, and compare what the command says of itself."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    files = shutil.copytree(place, folder / "files")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LORAPLEX_"))}
    environ["PATH"] = f"{folder / 'venv' / 'bin'}:{environ['PATH']}"
    answers = _run("sh", "-euxc", commands(), cwd=files, env=environ)
    print(answers)
    assert "[base model]" in answers
    version = f"loraplex {source.version} ({source.commit[:12]})\n"
    assert _run("loraplex", "--version", cwd=folder, env=environ) == version


def _run(*command: str, cwd: Path, env: Mapping[str, str]) -> str:
    """Run a command and return what it prints; what it says of errors is shown."""
    return subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    """Check the release of the checkout, which is in dist/TAG."""
    parser = argparse.ArgumentParser(description="Build a release again, and run the README's commands with it.")
    parser.add_argument("--python", default=sys.executable, help="Python of the empty environment")
    python = parser.parse_args().python
    source = read_source(ROOT)
    place = ROOT / "dist" / source.tag
    check_bytes(source, place)
    with TemporaryDirectory() as folder:
        check_installation(source, place, Path(folder), python)
    print(f"{source.tag}: the README's commands work in an empty environment of {python}")


if __name__ == "__main__":
    main()
