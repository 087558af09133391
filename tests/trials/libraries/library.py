"""The client libraries that are tried, each with its script of this folder, and how a script is run."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
CHAT = ("stream", "tools", "schema", "overflow")
RESPONSES = ("responses_stream", "responses_tools", "responses_schema")
# Timeout in seconds of a script; the slowest takes 10 on two cores, most of it for imports.
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Library:
    """A library: `packages` are those to install, with versions, itself first; `script` is a file of this folder.

    A library that comes with its program has no packages.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    scenarios: tuple[str, ...] = CHAT

    @property
    def program(self) -> str:
        """Return the program that runs the script: Python is that of the library's environment."""
        return {".py": "python", ".mjs": "node", ".java": "java"}[Path(self.script).suffix]

    @property
    def version(self) -> str:
        """Return the library's own version; empty for one that comes with the program."""
        return self.packages[0].replace("@", "==").rpartition("==")[2] if self.packages else ""

    async def outcomes(self, interpreter: str, directory: Path, url: str, model: str) -> Mapping[str, str]:
        """Run the script against a gateway; return why each of its scenarios failed, "" for one that passed.

        `directory` has Node's packages, is the script's home, and gets the log of its errors.
        """
        variables = {
            "HOME": str(directory),
            "LORAPLEX_MODEL": model,
            "LORAPLEX_URL": url,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet at its start
        }
        script = str(ROOT / "tests/trials/libraries" / self.script)
        is_python = self.program == "python"
        command = ["-m", f"tests.trials.libraries.{Path(script).stem}"] if is_python else [script]
        reported: dict[str, str] = {}
        with (directory / "script.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                interpreter,
                *command,
                cwd=ROOT if is_python else directory,
                env=os.environ | variables,
                stdout=PIPE,
                stderr=log,
            )
            assert process.stdout is not None
            missing = "the script did not report it"
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    async for line in process.stdout:
                        if line.startswith(b'{"scenario"'):  # libraries print as well
                            outcome = json.loads(line)
                            reported[outcome["scenario"]] = "" if outcome["ok"] else outcome["why"]
                    missing += f": exit code {await process.wait()}"
            except TimeoutError:
                process.kill()
                await process.wait()
                missing += f" within {_TIMEOUT_S:g} s"
        return {scenario: reported.get(scenario, missing) for scenario in self.scenarios}


LIBRARIES = (
    Library("openai", ("openai==3.57.0",), "use_openai.py", (*CHAT, *RESPONSES, "decisions")),
    Library("typesafe", ("typesafe-sdk==0.7.5",), "use_typesafe.py", ("questions", "content", "schema", "overflow")),
    Library("openai-node", ("openai@7.59.0", "zod@4.6.7"), "use_openai.mjs", (*CHAT, *RESPONSES)),
    Library("anthropic", ("anthropic==2.14.0",), "use_anthropic.py"),
    Library("huggingface_hub", ("huggingface_hub==2.4.0",), "use_huggingface_hub.py"),
    Library("cohere", ("cohere==7.3.1",), "use_cohere.py", ("rerank_v1", "rerank_v2", "overflow")),
    Library("litellm", ("litellm==1.110.2",), "use_litellm.py"),
    # The last version whose own parts are all on the package index.
    Library("litellm-proxy", ("litellm[proxy]==1.106.12",), "use_litellm_proxy.py"),
    Library("openai-agents", ("openai-agents==0.24.0",), "use_openai_agents.py"),
    Library("langchain", ("langchain-openai==1.7.4",), "use_langchain.py"),
    Library("instructor", ("instructor==1.17.0",), "use_instructor.py"),
    Library("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), "use_pydantic_ai.py", (*CHAT, "both")),
    Library("llama-index", ("llama-index-llms-openai-like==0.8.1", "llama-index-core==0.14.25"), "use_llama_index.py"),
    Library("dspy", ("dspy==3.4.1",), "use_dspy.py", (*CHAT, "both")),
    # The version of `make evaluate`, which compares the figures with its own.
    Library("guidellm", ("guidellm==0.8.1", "torch==2.13.0"), "use_guidellm.py", ("completions", "chat")),
    # Keep the version equal to that of `make evaluate`. Torch is missing: only models that it runs itself need it.
    Library("lm_eval", ("lm_eval[api]==0.4.13", "transformers==5.23.0"), "use_lm_eval.py", ("completions", "chat")),
    Library("java.net.http", (), "use_java.java"),
)
