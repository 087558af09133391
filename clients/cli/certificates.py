"""`loraplex adapters certify`: how far an adapter's answers on a quantized base are from those on the original."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.adapter_commands import NameArgument
from clients.cli.options import STORE, TENANT, JsonOption, StoreOption, TenantOption
from clients.cli.store import store_client
from clients.cli.terminal import Activity, CommandError, print_json, print_rows
from clients.cli.worker_command import ask_worker

if TYPE_CHECKING:
    from loraplex_client import FitnessCertificate, Revision, StoreClient

ModelDirOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory of the original base model, on this machine; for certificates."),
]


def certify(
    name: NameArgument,
    base: Annotated[str, typer.Option(metavar="SCHEME", help="How the base is quantized, such as int8 or int4.")],
    model_dir: ModelDirOption = None,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Measure an adapter on a quantized base against the original base, and keep the figures with its revision.

    [bold]loraplex adapters certify support --base int8 --model-dir ./Qwen2-0.5B --tenant acme[/]
    """
    if model_dir is None:
        raise CommandError("give the directory of the base model with --model-dir")
    with store_client(store, tenant) as client:
        _, revision = client.get(name)
        certificate = certify_revision(client, revision, base, model_dir)
    if as_json:
        print_json({"revision": revision.name, **certificate_json(certificate)})
        return
    _print_rows([(revision, certificate)])


def certify_revision(client: StoreClient, revision: Revision, scheme: str, model_dir: Path) -> FitnessCertificate:
    """Measure a revision on this machine, and keep its certificate in the store. Raises CommandError, LoraplexError."""
    from loraplex_client import FitnessCertificate

    from artifacts.errors import ArtifactError
    from artifacts.quantization import parse_quantization
    from clients.cli.models import read_model

    try:
        quantization = parse_quantization(scheme, "--base")
    except ArtifactError as error:
        raise CommandError(str(error)) from error
    if quantization is None:
        raise CommandError("--base: name a scheme, such as int8")
    original = read_model(str(model_dir), "model")
    if original.digest != revision.base_digest:
        raise CommandError(
            f"--model-dir: {model_dir} has digest {original.digest}; {revision.name} is for {revision.base_digest}"
        )
    with Activity() as activity, tempfile.TemporaryDirectory(prefix="loraplex-certify-") as directory:
        activity.step(f"measuring {revision.name} on {quantization}")
        client.download(revision.name, directory)
        figures = ask_worker("certify", model=str(model_dir), quantized=scheme, adapter=directory)
    certificate = FitnessCertificate(quantization=str(quantization), base_digest=original.digest, **figures)
    return client.certify(revision.name, certificate)


def certificate_json(certificate: FitnessCertificate) -> dict[str, Any]:
    """Return a certificate for --json."""
    time = certificate.create_time
    return {**asdict(certificate), "create_time": None if time is None else time.isoformat()}


def print_certificates(revisions: Iterable[Revision]) -> None:
    """Print the certificates of revisions, if there are any."""
    rows = [(revision, certificate) for revision in revisions for certificate in revision.certificates]
    if rows:
        _print_rows(rows)


def _print_rows(rows: Iterable[tuple[Revision, FitnessCertificate]]) -> None:
    print_rows(
        ("revision", "base", "agreement", "mean KL", "max KL", "prompts", "tokens", "verdict"),
        (
            (
                revision.digest[:19],
                certificate.quantization,
                f"{certificate.agreement:.3f}",
                f"{certificate.mean_kl:.4f}",
                f"{certificate.max_kl:.3f}",
                f"{certificate.prompts} {'drawn' if certificate.drawn else 'own'}",
                certificate.tokens,
                certificate.verdict + (f": {certificate.breach}" if certificate.breach else ""),
            )
            for revision, certificate in rows
        ),
    )
