"""Settings from flags and environment, and the one clear line for every mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from loraplex.runtime.rpc.settings import REDIS_URL_VARIABLE, SettingsError, read_settings, setting


@dataclass(frozen=True)
class Sample:
    """A sample process."""

    store: str = setting("where the store is")
    redis_url: str = setting("where Redis is", "redis://default", variable=REDIS_URL_VARIABLE)
    port: int = setting("a port", 1)
    drain_s: float = setting("seconds", 2.5)
    data: Path | None = setting("a directory", None)
    open_to_all: bool = setting("a switch", False)

    def __post_init__(self) -> None:
        if self.port > 9:
            raise ValueError(f"--port {self.port}: at most 9")


def read(argv: list[str], **environ: str) -> Sample:
    return read_settings(Sample, "sample-process", argv, environ)


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    settings = read(
        ["--port", "7", "--open-to-all"],
        LORAPLEX_SAMPLE_PROCESS_STORE="here:1",
        LORAPLEX_SAMPLE_PROCESS_PORT="5",
        LORAPLEX_SAMPLE_PROCESS_DATA="/data",
        PATH="/bin",
    )
    assert settings == Sample("here:1", "redis://default", 7, 2.5, Path("/data"), True)


def test_a_process_s_own_variable_wins_over_the_shared_one() -> None:
    assert read(["--store", "s"], LORAPLEX_REDIS_URL="redis://shared").redis_url == "redis://shared"
    own = {"LORAPLEX_REDIS_URL": "redis://shared", "LORAPLEX_SAMPLE_PROCESS_REDIS_URL": "redis://own"}
    assert read(["--store", "s"], **own).redis_url == "redis://own"


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        ([], {}, "missing setting: give --store or LORAPLEX_SAMPLE_PROCESS_STORE"),
        (["--store", "s", "--prot", "1"], {}, "unrecognized arguments: --prot 1"),
        (["--store", "s", "--port", "x"], {}, "--port: 'x' is not a whole number"),
        (["--store", "s", "--drain-s", "x"], {}, "--drain-s: 'x' is not a number"),
        (["--store", "s", "--open-to-all", "x"], {}, "--open-to-all: 'x' is not true or false"),
        (["--store", "s"], {"LORAPLEX_SAMPLE_PROCESS_PORT": "x"}, "LORAPLEX_SAMPLE_PROCESS_PORT: 'x' is not"),
        (
            ["--store", "s"],
            {"LORAPLEX_SAMPLE_PROCESS_PRT": "1"},
            "unknown environment variable LORAPLEX_SAMPLE_PROCESS",
        ),
        (["--store", "s", "--port", "10"], {}, "--port 10: at most 9"),
    ],
)
def test_a_mistake_is_named_in_one_line(argv: list[str], environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(argv, **environ)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_names_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "A sample process." in text
    for flag in ("--store", "--redis-url", "--port", "--drain-s", "--data", "--open-to-all", "(default: 2.5)"):
        assert flag in text
