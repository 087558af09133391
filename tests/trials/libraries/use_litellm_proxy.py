"""LiteLLM's proxy: OpenAI's client talks to it, and it to the gateway."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from tests.trials.libraries.scenarios import KEY, MODEL, TOO_LONG, URL, check_refused, run


@contextmanager
def proxy() -> Iterator[str]:
    """Run the proxy with the gateway's model; yields its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    served = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "config.yaml")  # JSON is YAML
        settings = {"dangerously_permit_weak_or_unset_master_key": True}
        models = [{"model_name": MODEL, "litellm_params": served}]
        config.write_text(json.dumps({"model_list": models, "general_settings": settings}))
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
        process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr, stderr=subprocess.PIPE)
        try:
            _wait_for_start(process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for_start(process: subprocess.Popen[bytes]) -> None:
    """Wait until the proxy logs that it serves, and pass its log on. Raises RuntimeError if it ends before."""
    assert process.stderr is not None
    log = sys.stderr.buffer
    for line in process.stderr:
        log.write(line)
        if b"Application startup complete" in line:
            threading.Thread(target=shutil.copyfileobj, args=(process.stderr, log), daemon=True).start()
            return
    raise RuntimeError("the proxy did not start")


if __name__ == "__main__":
    with proxy() as address:
        os.environ["LORAPLEX_URL"] = address
        # The modules read the address when they are imported.
        for module in ("tests.trials.libraries.scenarios", "tests.trials.libraries.use_openai"):
            sys.modules.pop(module, None)
        from tests.trials.libraries import use_openai

        def overflow() -> None:
            """Get an error with the gateway's words for a prompt that is too long; its code is the proxy's own."""
            chat = use_openai.client.chat.completions
            messages: Any = [{"role": "user", "content": TOO_LONG}]
            check_refused(lambda: chat.create(model=MODEL, messages=messages), openai.BadRequestError)

        run(use_openai.stream, use_openai.tools, use_openai.schema, overflow)
