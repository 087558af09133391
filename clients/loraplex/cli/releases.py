"""`loraplex releases`: how a revision of an adapter becomes the live one, and why it did or did not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.gates import Examination, Result, read_gates
from loraplex.cli.options import (
    ROUTER,
    STORE,
    TENANT,
    JsonOption,
    RouterOption,
    StoreOption,
    TenantOption,
    adapter_names,
    read_seconds,
)
from loraplex.cli.service import Service, explained, store_client
from loraplex.cli.terminal import (
    Columns,
    CommandError,
    format_timestamp,
    message_values,
    print_fields,
    print_json,
    print_rows,
    print_table,
    say,
)
from loraplex.contracts.artifacts.statements import SIGNATURE_FILE, sign_statement

if TYPE_CHECKING:
    from loraplex.adapters.v1 import releases_pb2

app = typer.Typer(no_args_is_help=True, help="Test a revision of an adapter, roll it out in steps, and roll it back.")
# The type of the statements that `export` signs.
_STATEMENT = "https://loraplex/release/v1"
ReleaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME[#N]",
        help="An adapter and the number of its release; without the number the newest.",
        autocompletion=adapter_names,
    ),
]
SourceOption = Annotated[str, typer.Option("--source", metavar="URI", help="URI that the adapter comes from.")]
PinOption = Annotated[str, typer.Option("--pin", metavar="TEXT", help="Commit or version of the source.")]
ParentOption = Annotated[str, typer.Option("--parent", metavar="DIGEST", help="Revision that training continued from.")]
RunOption = Annotated[str, typer.Option("--run-id", metavar="ID", help="Id of the training run.")]
DatasetOption = Annotated[list[str] | None, typer.Option("--dataset", metavar="NAME", help="A data set. Repeatable.")]


@app.command()
def push(  # noqa: PLR0913, PLR0917  # one parameter a flag
    adapter: Annotated[
        str, typer.Argument(metavar="DIR|URI", help="A peft adapter, or a source as `adapters import` takes it.")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="The adapter; default: the directory's name.")] = "",
    source: SourceOption = "",
    pin: PinOption = "",
    parent: ParentOption = "",
    run_id: RunOption = "",
    dataset: DatasetOption = None,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Upload or import an adapter and create a release of the revision, without an alias.

    A model.sig in the directory is sent along.

    [bold]loraplex releases push ./support-lora --name support --run-id 2041 --tenant acme[/]
    """
    name, signature = name or Path(adapter).resolve().name, b""
    with store_client(store, tenant) as client:
        if "://" in adapter:  # the store knows where it came from
            pushed = client.import_revision(adapter, name, alias="-")
        else:
            directory = Path(adapter).resolve()
            pushed = client.push(directory, name, alias="-")
            source = source or directory.as_uri()
            bundle = directory / SIGNATURE_FILE
            signature = bundle.read_bytes() if bundle.is_file() else b""
    origin, service = _origin(source, pin, parent, run_id, dataset), _service(store, tenant)
    _said(service.ask("CreateRelease", revision=pushed.revision.name, origin=origin, signature=signature).release)


@app.command()
def create(  # noqa: PLR0913, PLR0917  # one parameter a flag
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="NAME@ALIAS or NAME@sha256:...", autocompletion=adapter_names)
    ],
    source: SourceOption = "",
    pin: PinOption = "",
    parent: ParentOption = "",
    run_id: RunOption = "",
    dataset: DatasetOption = None,
    signature: Annotated[
        Path | None,
        typer.Option("--signature", metavar="FILE", help="Bundle that model-signing wrote for the files."),
    ] = None,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Create a release of a stored revision."""
    with store_client(store, tenant) as client:
        _, revision = client.get(name)
    origin, bundle = _origin(source, pin, parent, run_id, dataset), signature.read_bytes() if signature else b""
    service = _service(store, tenant)
    _said(service.ask("CreateRelease", revision=revision.name, origin=origin, signature=bundle).release)


@app.command("list")
def list_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The adapter.", autocompletion=adapter_names)],
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """List an adapter's releases, newest first."""
    with store_client(store, tenant) as client:
        adapter = client.full_name(name)
    releases = _service(store, tenant).list("ListReleases", "releases", parent=adapter)
    columns: Columns = {
        "release": _number,
        "state": lambda one: _state(one.state),
        "share": _share,
        "revision": lambda one: one.digest[:19],
        "run": lambda one: one.origin.run_id or "-",
        "created": lambda one: format_timestamp(one.create_time),
    }
    print_table(releases, columns, as_json=as_json, values=_values)


@app.command("history")
def show_history(
    name: ReleaseArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False
) -> None:
    """Show a release: where it comes from, its gates, its rollout, and every change of it with its figures."""
    release = _find(_service(store, tenant), name, store, tenant)
    if as_json:
        print_json(_values(release))
        return
    origin = [(field, value) for field, value in message_values(release.origin).items() if value]
    signer = [("signer", release.signer)] if release.signer else []
    named = [("release", release.name), ("state", _state(release.state)), ("revision", release.digest)]
    print_fields([*named, *signer, *origin])
    if release.gates:
        columns: Columns = {
            "gate": "name",
            "passed": lambda gate: "yes" if gate.passed else "no",
            "figures": lambda gate: _figures(gate.figures),
            "detail": "detail",
        }
        print_table(release.gates, columns)
    if release.HasField("rollout"):
        rollout = release.rollout
        print_rows(
            ("side", "requests", "errors", "refusals"),
            (
                (side, counts.requests, counts.errors, counts.refusals)
                for side, counts in (("live", rollout.live), ("candidate", rollout.candidate))
            ),
        )
        print_fields([("figures of this step", _figures(rollout.figures))])
    columns = {
        "time": lambda event: format_timestamp(event.time),
        "state": lambda event: _state(event.after),
        "by": "actor",
        "cause": "cause",
        "figures": lambda event: _figures(event.figures),
    }
    print_table(release.history, columns)


@app.command()
def diff(
    name: ReleaseArgument,
    other: Annotated[
        str, typer.Argument(metavar="[NAME#N]", help="Compare with this one; default: the revision that is live.")
    ] = "",
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Compare two releases: origin, rank, settings and figures of gates."""
    service = _service(store, tenant)
    gates: list[Sequence[releases_pb2.GateResult]]
    first = _find(service, name, store, tenant)
    with store_client(store, tenant) as client:
        adapter = first.name.partition("/releases/")[0]
        if other:
            second = _find(service, other, store, tenant)
            titles, digests = (f"#{_number(second)}", f"#{_number(first)}"), (second.digest, first.digest)
            gates = [second.gates, first.gates]
            origins = [message_values(second.origin), message_values(first.origin)]
        else:
            live = client.get(adapter)[1].digest
            titles, digests = ("live", f"#{_number(first)}"), (live, first.digest)
            gates = [(), first.gates]
            origins = [{}, message_values(first.origin)]
        sides = []
        for digest, origin, results in zip(digests, origins, gates, strict=True):
            _, revision = client.get(f"{adapter}@{digest}")
            side: dict[str, Any] = {"revision": digest[:19], "base": revision.base_digest[:19], "rank": revision.rank}
            side |= {f"origin.{field}": value for field, value in origin.items() if value}
            side |= {f"config.{field}": value for field, value in client.config(revision.name).items()}
            side |= {f"gate.{gate.name}.{figure}": value for gate in results for figure, value in gate.figures.items()}
            sides.append(side)
    before, after = sides
    fields = [field for field in dict.fromkeys([*before, *after]) if before.get(field) != after.get(field)]
    if as_json:
        print_json({field: [before.get(field), after.get(field)] for field in fields})
        return
    print_rows(("field", *titles), ((field, before.get(field, "-"), after.get(field, "-")) for field in fields))


@app.command()
def qualify(
    name: ReleaseArgument,
    gates: Annotated[Path, typer.Option("--gates", metavar="FILE", help="The gates, as TOML.")],
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Run gates on a release with requests of the lowest priority; qualify it if all pass.

    [bold]loraplex releases qualify support --gates gates.toml --tenant acme[/]
    """
    from loraplex_client import Client, NotFoundError

    wanted = read_gates(gates)
    service = _service(store, tenant)
    release = _find(service, name, store, tenant, {"verified", "qualified"})
    adapter = release.name.partition("/releases/")[0]
    with store_client(store, tenant) as client:
        _, revision = client.get(f"{adapter}@{release.digest}")
        try:
            live = f"{adapter}@{client.get(adapter)[1].digest}"
        except NotFoundError:  # it is the first
            live = ""
    with explained("router", router), Client(router, tenant) as client:
        examination = Examination(
            client, f"{adapter}@{release.digest}", live, revision.certificates, gates.resolve().parent
        )
        results = []
        for result in examination.run(wanted):
            _show(result)
            results.append(result)
    gates_run = [asdict(result) for result in results]
    _said(service.ask("QualifyRelease", name=release.name, etag=release.etag, gates=gates_run).release)
    if failed := sum(not result.passed for result in results):
        raise CommandError(f"{failed} of {len(results)} gates failed", 1)


def _show(result: Result) -> None:
    say(f"{'passed' if result.passed else 'FAILED'} {result.name} {_figures(result.figures)}".rstrip())
    if result.detail:
        say(f"    {result.detail}")


@app.command()
def promote(  # noqa: PLR0913, PLR0917  # one parameter a flag
    name: ReleaseArgument,
    canary: Annotated[
        str,
        typer.Option(
            metavar="PERCENT,...", help="Percent of the requests in each step, such as 5,25, before it becomes live."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(min=0, metavar="N", help="Minimum answers of the release in each step.")] = 0,
    time: Annotated[str, typer.Option(metavar="TIME", help="Minimum time of a step, such as 30m.")] = "",
    shadow: Annotated[
        float,
        typer.Option(
            min=0, max=100, metavar="PERCENT", help="Percent of live requests that the release computes too, unseen."
        ),
    ] = 0.0,
    min_requests: Annotated[int, typer.Option(min=1, metavar="N", help="Answers before the rules apply.")] = 20,
    max_error_rise: Annotated[
        float,
        typer.Option(min=0, metavar="SHARE", help="Roll back if its share of failed requests exceeds live's by SHARE."),
    ] = 0.02,
    max_ttft_ratio: Annotated[
        float | None,
        typer.Option(min=0, metavar="RATIO", help="Roll back if the median TTFT exceeds this multiple of live's."),
    ] = None,
    max_refusal_rise: Annotated[
        float | None,
        typer.Option(min=0, metavar="SHARE", help="Roll back if its share of refusals exceeds live's by SHARE."),
    ] = None,
    refusal: Annotated[
        list[str] | None, typer.Option("--refusal", metavar="TEXT", help="Text that marks a refusal. Repeatable.")
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="Roll back if less than SHARE of the --shadow tokens equal live's."
        ),
    ] = None,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Make a qualified release live, at once or in --canary steps that rules watch.

    [bold]loraplex releases promote support --canary 5,25 --requests 200 --max-ttft-ratio 1.5 --tenant acme[/]
    """
    service = _service(store, tenant)
    release = _find(service, name, store, tenant, {"qualified", "canary"})
    plan: dict[str, Any] | None = None
    if canary:
        seconds = round(read_seconds("--time", time)) if time else 0
        steps = [{"permille": one, "requests": requests, "seconds": seconds} for one in _permilles(canary)]
        rules = {
            "min_requests": min_requests,
            "max_error_rise": max_error_rise,
            "max_ttft_ratio": max_ttft_ratio,
            "max_refusal_rise": max_refusal_rise,
            "min_agreement": min_agreement,
        }
        plan = {
            "steps": steps,
            "rules": {rule: value for rule, value in rules.items() if value is not None},
            "shadow_permille": round(shadow * 10),
            "refusal_phrases": refusal or [],
        }
    _said(service.ask("PromoteRelease", name=release.name, etag=release.etag, plan=plan).release)


@app.command()
def abort(name: ReleaseArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """End a release that is not live; a canary's requests go back to the live revision."""
    service = _service(store, tenant)
    release = _find(service, name, store, tenant, {"imported", "verified", "qualified", "canary"})
    _said(service.ask("AbortRelease", name=release.name, etag=release.etag).release)


@app.command()
def rollback(name: ReleaseArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """End the canary or live release; the former live revision serves again."""
    service = _service(store, tenant)
    release = _find(service, name, store, tenant, {"canary"}, {"live"})
    _said(service.ask("RollBackRelease", name=release.name, etag=release.etag).release)


@app.command()
def export(
    name: ReleaseArgument,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="PEM file of the signing private key.")],
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Print a release with its history as a signed in-toto statement, in a bundle as model-signing writes it."""
    from loraplex.contracts.artifacts import ArtifactError

    release = _find(_service(store, tenant), name, store, tenant)
    try:
        print(sign_statement(release.name, release.digest, _STATEMENT, _values(release), key.read_bytes()).decode())
    except ArtifactError as error:
        raise CommandError(f"--key {key}: {error.message}") from error


def _service(store: str, tenant: str) -> Service:
    return Service("store", store, "adapters.v1.releases", tenant)


def _origin(source: str, pin: str, parent: str, run_id: str, datasets: list[str] | None) -> dict[str, Any]:
    return {"source": source, "pin": pin, "parent_digest": parent, "run_id": run_id, "datasets": datasets or []}


def _permilles(text: str) -> list[int]:
    try:
        return [round(float(part) * 10) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"--canary {text}: write percents with commas, such as 5,25") from None


def _get(service: Service, name: str) -> releases_pb2.Release:
    release: releases_pb2.Release = service.ask("GetRelease", name=name).release
    return release


def _find(service: Service, name: str, store: str, tenant: str, *states: Iterable[str]) -> releases_pb2.Release:
    """Return the release that NAME#N names, or without a number the newest in one of the first states that has any."""
    adapter, _, number = name.partition("#")
    with store_client(store, tenant) as client:
        adapter = client.full_name(adapter)
    if number:
        return _get(service, f"{adapter}/releases/{number}")
    releases = service.list("ListReleases", "releases", parent=adapter)
    if not releases:
        raise CommandError(f"{adapter} has no releases; make one with: loraplex releases push")
    for wanted in states or [{_state(one.state) for one in releases}]:
        for release in releases:
            if _state(release.state) in wanted:
                return _get(service, release.name)
    words = ", ".join(sorted({word for wanted in states for word in wanted}))
    raise CommandError(f"{adapter} has no release that is {words}; the newest is {_state(releases[0].state)}")


def _state(state: releases_pb2.ReleaseState.ValueType) -> str:
    from loraplex.adapters.v1 import releases_pb2

    return releases_pb2.ReleaseState.Name(state).removeprefix("RELEASE_STATE_").replace("_", " ").lower()


def _number(release: releases_pb2.Release) -> str:
    return release.name.rpartition("/")[2]


def _share(release: releases_pb2.Release) -> str:
    if _state(release.state) != "canary":
        return "-"
    return f"{release.rollout.plan.steps[release.rollout.step].permille / 10:g}%"


def _figures(figures: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(figures.items()))


def _values(release: releases_pb2.Release) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(release, preserving_proto_field_name=True)


def _said(release: releases_pb2.Release) -> None:
    share = _share(release)
    say(f"{release.name} is {_state(release.state)}{'' if share == '-' else f', {share}'}: {release.history[-1].cause}")
