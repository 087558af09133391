"""Sets up a process's logs: a line on stderr for each event, plain or JSON, without prompts and outputs.

Fields stand beside a line's message: `log.info("request ended", extra=fields(request_id="r-1"))`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# Log settings that all processes of a host share.
FORMAT_VARIABLE, LEVEL_VARIABLE = "LORAPLEX_LOG_FORMAT", "LORAPLEX_LOG_LEVEL"
FORMAT_HELP = f"format of log lines: text or json; also {FORMAT_VARIABLE}"
LEVEL_HELP = f"minimum level of log lines: {', '.join(LEVELS)}; also {LEVEL_VARIABLE}"

_FIELDS = "loraplex_fields"
# Control characters and line ends: what a client has sent must not begin a line of its own, or control a terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    code: f"\\u{code:04x}" for code in (0x2028, 0x2029)
}


def fields(**values: Any) -> dict[str, Any]:
    """Return the `extra=` of a logging call: names and values that the line carries."""
    return {_FIELDS: values}


def check_logging(log_format: str, log_level: str) -> None:
    """Check log settings. Raises ValueError on an unknown format or level."""
    if log_format not in FORMATS:
        raise ValueError(f"--log-format {log_format}: not one of {', '.join(FORMATS)}")
    if log_level not in LEVELS:
        raise ValueError(f"--log-level {log_level}: not one of {', '.join(LEVELS)}")


def set_up_logging(process: str, log_format: str = "text", log_level: str = "info") -> None:
    """Log to stderr. Raises ValueError on an unknown format or level."""
    check_logging(log_format, log_level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process) if log_format == "json" else _TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())


def logging_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a child's own `log_format` and `log_level`, as `environment_of` has given them to it."""
    values = {"log_format": environ.get(FORMAT_VARIABLE), "log_level": environ.get(LEVEL_VARIABLE)}
    return {name: value for name, value in values.items() if value}


def environment_of(log_format: str, log_level: str) -> Mapping[str, str]:
    """Return the environment variables with which a child process logs alike."""
    return {FORMAT_VARIABLE: log_format, LEVEL_VARIABLE: log_level}


class LogOnce:
    """Logs what a process meets again and again when it begins and when it changes."""

    def __init__(self, log: logging.Logger, level: int = logging.WARNING) -> None:
        self._log, self._level, self._last = log, level, ""

    def __call__(self, message: str) -> None:
        """Log a message, unless it is the last one."""
        if message != self._last:
            self._log.log(self._level, "%s", message)
        self._last = message

    def reset(self) -> bool:
        """Forget the last message, since its cause has passed; return whether there was one."""
        passed, self._last = bool(self._last), ""
        return passed


def _encodable(text: str) -> str:
    """Escape halves of surrogate pairs, which cannot be written."""
    return text.encode(errors="backslashreplace").decode()


class _TextLines(logging.Formatter):
    """Formats a line as `time level process logger: message name=value ...`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's own name
        """Return the line without a traceback."""
        values = getattr(record, _FIELDS, {})
        line = super().formatMessage(record) + "".join(f" {name}={value}" for name, value in values.items())
        return _encodable(line.translate(_CONTROLS))

    def formatException(self, ei: Any) -> str:  # logging's own name
        """Return a traceback, whose lines are indented: none reads as a line of the log."""
        lines = super().formatException(ei).split("\n")
        return _encodable("\n".join(f"  {line.translate(_CONTROLS)}" for line in lines))


class _JsonLines(logging.Formatter):
    """Formats a line as a JSON object, with the traceback among its values."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; its `time` is UTC."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: no character of a value means anything to a terminal
