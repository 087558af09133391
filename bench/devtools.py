"""A page in a headless Chromium, driven over the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from bench.screenshots import FLAGS, NoBrowserError, save_picture

# Chromium reads commands from file descriptor 3 and writes answers to 4; this becomes Chromium with its pipes there.
_START = "import os, sys; [os.dup2(int(sys.argv[at]), at + 2) for at in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
_FIRST_FREE = 10
# The modifier of a key event.
_CONTROL = 2
# Timeout in seconds of a command: pages take seconds to load where the machine is busy.
_COMMAND_S = 60.0
# Maximum bytes of an answer: a screenshot is the largest.
_ANSWER_BYTES = 32 * 1024 * 1024


class Page:
    """A tab. `requests` has the address of every request that it made."""

    def __init__(self, commands: asyncio.StreamWriter, answers: asyncio.StreamReader) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._commands = commands
        self._answers = answers
        self._session = ""
        self._number = 0
        self._loaded = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self, address: str, *, width: int = 1280, height: int = 900) -> None:
        """Open a fresh tab of this size in pixels, and load the address in it."""
        self._session = ""
        self.requests.clear()
        self.errors.clear()
        tab = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Network", "Runtime", "Page", "Log"):
            await self.send(f"{domain}.enable")
        await self.resize(width, height)
        self._loaded.clear()
        await self.send("Page.navigate", url=address)
        async with asyncio.timeout(_COMMAND_S):
            await self._loaded.wait()

    async def resize(self, width: int, height: int) -> None:
        """Give the tab another size in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def show_dark(self, dark: bool) -> None:
        """Let the tab prefer dark or light colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited. Raises RuntimeError."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def wait_for(self, condition: str) -> Any:
        """Wait until a JavaScript condition is true, looked at every 20 ms; returns its value."""
        return await self.evaluate(
            f"new Promise((done) => {{ const look = () => {{ const found = ({condition});"
            " found ? done(found) : setTimeout(look, 20); }; look(); })"
        )

    async def type(self, selector: str, text: str) -> None:
        """Type a text into a field, in place of what it had."""
        await self.evaluate(f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
                            " field.focus(); field.select(); })()")  # fmt: skip
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, control: bool = False) -> None:
        """Press a key where the focus is."""
        held: dict[str, Any] = {"key": key, "code": key, "modifiers": _CONTROL if control else 0}
        text = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" and not control else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **held, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **held)

    async def save(self, picture: Path, *, width: int, dark: bool = False, most: int = 0) -> None:
        """Write the whole page, `width` pixels wide and cut at `most` of height (0: not), as a PNG."""
        await self.show_dark(dark)
        await self.resize(width, 900)
        await self.resize(width, await self.evaluate("document.documentElement.scrollHeight"))
        png = base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])
        save_picture(png, picture, most=most)

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError on an error."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self._commands.write(json.dumps(command).encode() + b"\0")
        async with asyncio.timeout(_COMMAND_S):
            await asyncio.wait([answer, self._reading], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise NoBrowserError("the browser has ended")
        result: dict[str, Any] = answer.result()
        return result

    async def _read(self) -> None:
        """Read answers and events until the browser ends."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._answers.readuntil(b"\0"))[:-1])
                answer = self._waiting.pop(message.get("id", 0), None)
                if answer is None:
                    self._note(message)
                elif "error" in message:
                    answer.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])

    def _note(self, event: dict[str, Any]) -> None:
        match event["method"], event["params"]:
            case "Page.loadEventFired", _:
                self._loaded.set()
            case "Network.requestWillBeSent", {"request": {"url": address}}:
                self.requests.append(address)
            case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                self.errors.append(str(details.get("exception", details).get("description", details)))
            case "Log.entryAdded", {"entry": {"level": "error", "text": text}}:
                self.errors.append(text)

    async def close(self) -> None:
        """End the browser."""
        self._session = ""
        with suppress(RuntimeError, NoBrowserError):
            await self.send("Browser.close")
        self._commands.close()
        await self._reading


@asynccontextmanager
async def browser_page(browser: str) -> AsyncIterator[Page]:
    """Start a browser and yield a page of it. Raises NoBrowserError."""
    with tempfile.TemporaryDirectory(prefix="loraplex-browser-", ignore_cleanup_errors=True) as directory:
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={directory}"]
        start = [sys.executable, "-ISc", _START, str(theirs_in), str(theirs_out), browser, *flags]
        process = await asyncio.create_subprocess_exec(
            *start,
            pass_fds=(theirs_in, theirs_out),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        page = Page(*await _streams(ours_out, ours_in))
        try:
            yield page
        finally:
            await page.close()
            try:
                async with asyncio.timeout(_COMMAND_S):
                    await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe with numbers that are not those that Chromium's get."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


async def _streams(out: int, into: int) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_ANSWER_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(into, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(out, "wb", 0))
    return asyncio.StreamWriter(transport, protocol, None, loop), reader
