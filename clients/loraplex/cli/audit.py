"""`loraplex audit`: check the audit log of a router or store, and read it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.options import JsonOption, read_seconds
from loraplex.cli.terminal import CommandError, print_error, print_json, print_rows, say

if TYPE_CHECKING:
    from loraplex.runtime.tenancy.audit_log import ChainHead

app = typer.Typer(no_args_is_help=True, help="Check and read audit logs.")

FilesArgument = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Files of logs, each FILE and FILE.NUMBER, in any order.")
]
# Maximum faults that are printed.
_FAULTS = 20


@app.command()
def verify(
    files: FilesArgument,
    known: Annotated[
        str, typer.Option(metavar="NUMBER:SHA256", help="A head that an earlier verify printed; must still be there.")
    ] = "",
) -> None:
    """Find altered, removed, added or moved records; exit with 1 if there are any.

    Prints each log's head: number and SHA-256 of the last record. Keep it where the log's host cannot write, and give
    it as --known the next time, with one log: only that shows that the end was cut off, or that all of the log was
    written anew.

    [bold]loraplex audit verify router.jsonl* store.jsonl*[/]
    """
    from loraplex.cli.audit_chain import read, verify

    head, altered = _head(known), list[str]()
    logs = _logs(files)
    if head is not None and len(logs) > 1:
        raise CommandError(f"--known: a head is of one log, and these files are of {', '.join(map(str, logs))}")
    for log, parts in logs.items():
        verified = verify(read(parts), head)
        for fault in verified.faults[:_FAULTS]:
            print_error(str(fault))
        if len(verified.faults) > _FAULTS:
            print_error(f"{len(verified.faults) - _FAULTS} further faults")
        say(f"{f'{log}: ' if len(logs) > 1 else ''}{verified.records} records, head {verified.head}")
        if verified.faults:
            altered.append(str(log))
    if altered:
        raise CommandError(f"not as it was written: {', '.join(altered)}", exit_code=1)


@app.command()
def show(
    files: FilesArgument,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only records of this tenant.")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Only newer records: 2h, 30d, or 2026-11-22.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print records, the oldest first. Does not verify them.

    [bold]loraplex audit show audit.jsonl* --tenant acme --since 7d[/]
    """
    records = _records(files, tenant, _earliest(since))
    if as_json:
        for record in records:
            print_json(record)
        return
    print_rows(("number", "time", "process", "event", "caller", "tenant", "result", "details"), map(_row, records))


def _logs(files: list[Path]) -> dict[Path, list[Path]]:
    """Return the files by their log: FILE, without the number of one that was rotated."""
    logs: dict[Path, list[Path]] = {}
    for file in files:
        log = file.with_suffix("") if file.suffix[1:].isdecimal() else file
        logs.setdefault(log, []).append(file)
    return logs


def _head(text: str) -> ChainHead | None:
    from loraplex.runtime.tenancy.audit_log import ChainHead

    try:
        return ChainHead.parse(text) if text else None
    except ValueError as error:
        raise CommandError(f"--known: {error}") from error


def _earliest(text: str) -> str:
    """Return the time of --since as records have theirs; empty for none."""
    if not text:
        return ""
    try:
        if text[-1:].isalpha() and text[-1:] != "Z":
            at = time.time() - read_seconds("--since", text)
        else:
            parsed = datetime.fromisoformat(text)
            at = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except ValueError as error:
        raise CommandError(f"--since {text}: write 2h, 30d or a date such as 2026-11-22") from error
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _records(files: list[Path], tenant: str, earliest: str) -> Iterator[Mapping[str, Any]]:
    from loraplex.cli.audit_chain import read

    for line in read(files):
        values = line.values
        if values is not None and str(values.get("time", "")) >= earliest and (not tenant or _concerns(values, tenant)):
            yield values


def _concerns(values: Mapping[str, Any], tenant: str) -> bool:
    """Tell whether a record's caller acted for the tenant, or its details name it."""
    details = values.get("details")
    named = list(details.values()) if isinstance(details, Mapping) else []
    return tenant in (values.get("tenant"), *named) or any(str(one).startswith(f"tenants/{tenant}/") for one in named)


def _row(values: Mapping[str, Any]) -> tuple[object, ...]:
    shown = ("previous", "number", "time", "process", "event", "method", "caller", "tenant", "result", "reason")
    more = {name: value for name, value in values.items() if name not in {*shown, "details", "credential"}}
    details = values.get("details")
    if isinstance(details, Mapping):
        more |= details
    return (
        values["number"],
        values.get("time", "-"),
        values.get("process", "-"),
        f"{values.get('event', '')} {values.get('method', '')}".strip(),
        values.get("caller") or "-",
        values.get("tenant") or "-",
        values.get("result") or values.get("reason") or "-",
        " ".join(f"{name}={value}" for name, value in more.items()) or "-",
    )
