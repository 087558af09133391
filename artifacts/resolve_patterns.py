"""Resolves the patterns of an adapter's configuration in a child process, which a bad one may end.

The store does so before it keeps a revision (it is such a child itself); this is for revisions that it kept earlier.

    python -m artifacts.resolve_patterns    reads {"modules", "patterns", "cpu_s"}, answers [[field, entries], ...]
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace

from artifacts.errors import ArtifactError, MismatchError
from artifacts.name_patterns import NamePatterns
from artifacts.peft_config import PeftConfig

# Maximum processor time in seconds, and bytes of address space, of the child; timeout in seconds for its answer.
CPU_S = 2.0
MEMORY_BYTES = 1 << 29
WALL_S = 30.0


def with_names(config: PeftConfig, modules: Collection[str], cpu_s: float = CPU_S) -> PeftConfig:
    """Return a configuration whose patterns are names of these modules; starts a process if they are not.

    Raises ArtifactError, MismatchError.
    """
    if not config.has_expressions:
        return config
    patterns = [
        (config.rank_pattern.field, config.rank_pattern.entries, config.rank),
        (config.alpha_pattern.field, config.alpha_pattern.entries, config.alpha),
    ]
    request = json.dumps({"modules": list(modules), "patterns": patterns, "cpu_s": cpu_s}).encode()
    # -P: a folder named artifacts in the working directory must not take the place of this one.
    command = [sys.executable, "-P", "-m", "artifacts.resolve_patterns"]
    try:
        child = subprocess.run(command, input=request, stdout=subprocess.PIPE, timeout=WALL_S, check=True)
    except subprocess.SubprocessError as error:
        raise MismatchError("rank_pattern", "the patterns take too long; use module names") from error
    ranks, alphas = (
        NamePatterns(field, tuple((name, value) for name, value in entries))
        for field, entries in json.loads(child.stdout)
    )
    return replace(config, rank_pattern=ranks, alpha_pattern=alphas)


def main() -> None:
    """Answer the one request."""
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    request = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    answer = []
    for field, entries, default in request["patterns"]:
        patterns = NamePatterns(field, tuple((pattern, value) for pattern, value in entries))
        answer.append((field, patterns.resolved(request["modules"], default).entries))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    try:
        main()
    except ArtifactError as error:
        sys.exit(str(error))
