"""The audit log: a chain that goes on over restarts, crashes and files, and that shows what was altered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from loraplex.cli.audit_chain import Verified, lines_of, read, verify
from loraplex.runtime.telemetry.metrics import Meters
from loraplex.runtime.tenancy.audit_log import BEGINNING, AuditCounts, AuditFileError, AuditLog, ChainHead


def audit_log(path: Path, **options: int) -> AuditLog:
    """Return an audit log of a store."""
    return AuditLog(str(path), "store", AuditCounts(Meters()), **options)


def write(path: Path, *names: str) -> None:
    """Write a log with `started`, an event for each name, and `stopped`."""
    log = audit_log(path)
    for name in names:
        log.record("call", name=name)
    log.close()


def check(*paths: Path, known: ChainHead | None = None) -> Verified:
    """Verify files."""
    return verify(read(paths), known)


def faults_of(path: Path, lines: Iterable[bytes]) -> list[tuple[int, str]]:
    """Return the faults of a log with these lines instead."""
    path.write_bytes(b"\n".join(lines) + b"\n")
    return [(fault.number, fault.what) for fault in check(path).faults]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a log to be made."""
    return tmp_path / "audit.jsonl"


def test_a_chain_goes_on_over_restarts(path: Path) -> None:
    write(path, "a", "b")
    write(path, "c")
    records = [line.values for line in lines_of(path) if line.values]
    assert [record["number"] for record in records] == list(range(1, 8))
    assert [record.get("name", record["event"]) for record in records] == [
        *("started", "a", "b", "stopped"),
        *("started", "c", "stopped"),
    ]
    found = check(path)
    assert (found.records, found.head.number, found.faults) == (7, 7, [])
    assert path.stat().st_mode & 0o777 == 0o600


def test_on_the_standard_output_each_start_begins_a_chain(path: Path) -> None:
    code = (
        "from tests.tenancy.test_audit_log import Path, audit_log\n"
        "for name in 'ab':\n    log = audit_log(Path('-')); log.record('call', name=name); log.close()"
    )
    written = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.splitlines(True)
    assert [json.loads(line)["event"] for line in written] == ["started", "call", "stopped"] * 2
    for start in (written[:3], written[3:]):
        path.write_bytes(b"".join(start))
        assert (check(path).records, check(path).faults) == (3, [])


def test_every_way_to_alter_a_log_is_found(path: Path) -> None:
    write(path, *"abcdef")
    lines = path.read_bytes().splitlines()
    assert faults_of(path, [*lines[:3], lines[3].replace(b'"c"', b'"x"'), *lines[4:]]) == [
        (4, "record 4 has been altered")
    ]
    forged = json.loads(lines[3]) | {"previous": "0" * 64}
    assert faults_of(path, [*lines[:3], json.dumps(forged).encode(), *lines[4:]]) == [(4, "record 4 has been altered")]
    assert faults_of(path, [*lines[:2], *lines[3:]]) == [(3, "record 3 is missing before record 4")]
    assert faults_of(path, [*lines[:2], *lines[5:]]) == [(3, "records 3 to 5 are missing before record 6")]
    assert faults_of(path, lines[2:]) == [(1, "records 1 to 2 are missing before record 3")]
    assert [line for line, _ in faults_of(path, [*lines[:2], lines[3], lines[2], *lines[4:]])] == [3, 4, 5]
    assert faults_of(path, [*lines[:3], lines[2], *lines[3:]]) == [(4, "record 3 is out of order: it follows record 3")]
    for other in (b"{}", b"[" * 9_999):
        assert faults_of(path, [*lines[:3], other, *lines[4:]])[0] == (4, "is not a record")
    path.write_bytes(b"\n".join(lines[:4]) + b"\n" + lines[4][:50])
    assert [(fault.number, fault.what) for fault in check(path).faults] == [(5, "is cut")]


def test_a_known_head_shows_that_the_end_is_missing_or_another(path: Path) -> None:
    write(path, "a", "b")
    known = check(path).head
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert check(path).faults == []  # the chain alone cannot show it
    assert [fault.what for fault in check(path, known=known).faults] == [
        f"is the last record; the known one, {known}, is missing"
    ]
    assert [fault.what for fault in verify([], known).faults] == [f"has no record; the known one, {known}, is missing"]
    assert verify([], BEGINNING).faults == []
    write(path, "c")
    assert [fault.number for fault in check(path, known=known).faults] == [4]
    assert ChainHead.parse(str(known)) == known


def test_a_log_may_be_checked_from_a_known_record_on(path: Path, tmp_path: Path) -> None:
    write(path, "a", "b")
    whole = check(path).head
    known = [line.head for line in lines_of(path)][1]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[2:]))
    assert check(path, known=known).faults == []
    assert check(path, known=known).head == whole
    assert check(path, known=ChainHead(known.number, "1" * 64)).faults


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_line_is_taken_out_and_recorded(path: Path, cut: int) -> None:
    write(path, "a")
    torn = path.read_bytes().splitlines()[-1][:cut].replace(b"stopped", b"what?")
    with open(path, "ab") as file:
        file.write(torn)
    write(path, "b")
    found = check(path)
    assert (found.records, found.faults) == (7, [])
    repaired = [line.values for line in lines_of(path) if line.values and line.values["event"] == "repaired"]
    assert [(record["bytes"], record["torn"]) for record in repaired] == [(cut, torn.decode())]


def test_full_files_get_names_of_their_own(path: Path) -> None:
    log = audit_log(path, file_bytes=400)
    for at in range(5):
        log.record("call", name="x" * 300)
        while log.head.number < at + 2:
            os.sched_yield()
    log.close()
    files = sorted(path.parent.iterdir())
    assert len(files) > 3
    assert files[1].name == "audit.jsonl.000000000001"
    assert (check(*files).records, check(*files).faults) == (7, [])
    assert check(*files[:2], *files[3:]).faults
    path.unlink()  # as after a crash right after the renaming
    write(path, "b")
    assert [fault.what for fault in check(*files).faults] == []
    assert check(*files).records > 5


@pytest.mark.parametrize("makes_another", [False, True])
def test_a_file_that_is_moved_away_takes_no_later_records_with_it(path: Path, makes_another: bool) -> None:
    log = audit_log(path)
    log.record("call", name="a")
    while log.head.number < 2:
        os.sched_yield()
    moved = path.rename(path.with_name("audit.jsonl-20261123"))
    if makes_another:
        path.touch(0o600)
    log.record("call", name="b")
    log.close()
    assert (check(moved).records, check(path, known=check(moved).head).records) == (2, 2)
    assert check(moved, path).faults == []
    write(path, "c")
    assert check(moved, path).faults == []


def test_control_characters_are_escaped_and_texts_are_cut(path: Path) -> None:
    write(path, "a\r\n\x1b[31m\x7f\x85\u2028\ud800", "y" * 10_000)
    text = path.read_bytes()
    assert all(byte == 10 or 32 <= byte < 127 for byte in text)
    assert len(text.splitlines()) == 4
    assert len(text) < 2_000
    assert check(path).faults == []


def test_a_file_that_is_no_audit_log_or_in_use_is_left_alone(path: Path) -> None:
    for content in (b"a diary", b"a diary\n", b"{}\n"):
        path.write_bytes(content)
        with pytest.raises(AuditFileError, match="not an audit record"):
            audit_log(path)
        assert path.read_bytes() == content
    path.unlink()
    log = audit_log(path)
    with pytest.raises(AuditFileError, match="in use by another process"):
        audit_log(path)
    log.close()


def test_what_the_disk_does_not_take_is_written_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, failures = os.fsync, [OSError(28, "No space left on device")] * 2

    def failing(file: int) -> None:
        if failures:
            raise failures.pop()
        fsync(file)

    monkeypatch.setattr("loraplex.runtime.tenancy.audit_log.RETRY_S", 0.0)
    monkeypatch.setattr("os.fsync", failing)
    log = audit_log(path)
    while log.head.number < 1:
        os.sched_yield()
    log.close()
    assert (check(path).records, check(path).faults) == (2, [])


def test_a_killed_process_leaves_a_chain_that_goes_on(path: Path) -> None:
    code = (
        "import sys, os, signal; from tests.tenancy.test_audit_log import audit_log; from pathlib import Path\n"
        f"log = audit_log(Path({str(path)!r}))\n"
        "for at in range(2000): log.record('call', name=str(at))\n"
        "while log.head.number < 100: os.sched_yield()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    write(path, "after")
    found = check(path)
    assert found.records >= 103
    assert found.faults == []
