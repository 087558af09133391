"""`loraplex models`: registers, lists, promotes and rolls back the adapter store's base models."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.cluster import ClusterReader
from loraplex.cli.gguf_models import import_, local_model
from loraplex.cli.options import (
    ROUTER,
    STORE,
    TENANT,
    JsonOption,
    KvCacheOption,
    QuantizeOption,
    RouterOption,
    StoreOption,
    TenantOption,
)
from loraplex.cli.service import store_client
from loraplex.cli.terminal import Columns, CommandError, print_table, say

if TYPE_CHECKING:
    from loraplex.contracts.artifacts.base_model import BaseModel as ModelManifest
    from loraplex_client import BaseModel

app = typer.Typer(no_args_is_help=True, help="Register and list base models, and promote their revisions.")
app.command("import")(import_)

# Interval in seconds between looks at the workers that are waited for.
LOOK_S = 0.5

WorkersOption = Annotated[
    int, typer.Option("--workers", min=0, metavar="N", help="Number of workers that must serve it first.")
]
WaitOption = Annotated[
    float, typer.Option("--wait-s", min=0, metavar="SECONDS", help="Timeout of the wait for these workers.")
]


@app.command()
def push(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A transformers directory, a GGUF file, or hash:?... for the hash model."),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name to register; the directory's by default.")] = "",
    quantize: QuantizeOption = "",
    kv_cache_dtype: KvCacheOption = "",
    stage: Annotated[
        bool, typer.Option("--stage", help="Stage it beside the live revision, for `models promote`.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Make it live at once, before any worker serves it.")
    ] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Register a base model: manifest and small files, not the weights.

    With --quantize or --kv-cache-dtype the model's workers need the same flag.
    """
    if stage and replace:
        raise CommandError("--stage keeps the live revision and --replace does not; give one of them")
    directory, name = local_model(path, name)
    model = read_model(directory, name, quantize, kv_cache_dtype)
    with store_client(store, tenant) as client:
        before = {one.name for one in client.models()}
        kept = client.register_model(registered(model), model.files, replace=replace, stage=stage)
    if kept.state in {"live", ""}:
        say(f"registered {model.name} {model.digest}")
    else:
        say(f"{kept.state} {model.name} {model.digest}; start its workers, then: loraplex models promote {model.name}")
    if len(before) == 1 and model.name not in before:
        say(f"the store has {', '.join(before)} too: requests that name no model are refused from now on")
    if defaults := model.generation_config.text:
        say(f"requests that leave them unset get the values of its generation_config.json: {defaults}")
    if directory != path:
        say(f"its workers need: --model {directory}")


@app.command()
def promote(
    model: Annotated[
        str, typer.Argument(metavar="NAME[@DIGEST]", help="The base model; without digest the staged revision.")
    ],
    workers: WorkersOption = 1,
    wait_s: WaitOption = 600.0,
    tenant: TenantOption = TENANT,
    router: RouterOption = ROUTER,
    store: StoreOption = STORE,
) -> None:
    """Make a staged revision of a base model live once workers serve it.

    The former revision's workers go on: calls with adapters that were uploaded for it, and calls that run. Roll back
    while they do, or stop them.
    """
    name, _, digest = model.partition("@")
    _promote(name, digest, "staged", workers, wait_s, tenant, router, store)


@app.command()
def rollback(
    model: Annotated[str, typer.Argument(metavar="NAME", help="The base model.")],
    workers: WorkersOption = 1,
    wait_s: WaitOption = 600.0,
    tenant: TenantOption = TENANT,
    router: RouterOption = ROUTER,
    store: StoreOption = STORE,
) -> None:
    """Make the former revision of a base model live again, once workers serve it."""
    _promote(model, "", "former", workers, wait_s, tenant, router, store)


def _promote(
    name: str, digest: str, state: str, workers: int, wait_s: float, tenant: str, router: str, store: str
) -> None:
    with store_client(store, tenant) as client:
        revisions = [model for model in client.models(all_revisions=True) if model.name == name]
        if not revisions:
            raise CommandError(f"base model {name} is not registered; register it with: loraplex models push")
        found = [model for model in revisions if (model.digest == digest if digest else model.state == state)]
        if not found:
            have = ", ".join(f"{model.state} {model.digest}" for model in revisions)
            hint = "; stage one with: loraplex models push --stage" if state == "staged" and not digest else ""
            raise CommandError(f"base model {name} has no {digest or state} revision, only {have}{hint}")
        if found[0].state == "live":
            say(f"{name} {found[0].digest} is live")
            return
        _wait_for_workers(ClusterReader(router, tenant), name, found[0].digest, workers, wait_s)
        client.promote_model(name, found[0].digest)
        say(f"promoted {name} {found[0].digest}")
        former = next((model.digest for model in revisions if model.state == "live"), "")
        if former:
            say(f"former revision {former}; roll back with: loraplex models rollback {name}")


def _wait_for_workers(reader: ClusterReader, name: str, digest: str, wanted: int, wait_s: float) -> None:
    """Wait until so many workers serve a revision. Raises CommandError."""
    end, shown = time.monotonic() + wait_s, -1
    while True:
        serving = sum(
            (worker["model"], worker["base_digest"], worker["phase"]) == (name, digest, "serving")
            for worker in reader.workers()
        )
        if serving >= wanted:
            return
        if time.monotonic() >= end:
            raise CommandError(
                f"{serving} of {wanted} workers serve {name} {digest} after {wait_s:g} s; nothing was promoted"
            )
        if serving != shown:
            say(f"waits for workers that serve {name} {digest}: {serving} of {wanted}")
            shown = serving
        time.sleep(LOOK_S)


@app.command("list")
def list_(tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the registered base models with their revisions: live, staged and former."""
    with store_client(store, tenant) as client:
        models = client.models(all_revisions=True)
    from loraplex.contracts.artifacts.generation_config import GenerationConfig

    columns: Columns = {
        "model": "name",
        "state": "state",
        "architecture": "architecture",
        "context": "context_length",
        "vocabulary": "vocab_size",
        "layers": "layers",
        "weights": lambda model: model["quantization"] or "as given",
        "KV cache": lambda model: model["kv_cache_dtype"] or "as computed",
        "defaults": lambda model: GenerationConfig.of(model["generation_config"]).text or "none",
        "digest": lambda model: model["digest"][:19],
    }
    print_table(map(_model_json, models), columns, as_json=as_json)


def read_model(path: str, name: str, quantize: str = "", kv_cache_dtype: str = "") -> ModelManifest:
    """Read the manifest of the model at `path`. Raises CommandError."""
    from loraplex.contracts.artifacts import ArtifactError
    from loraplex.contracts.artifacts.base_model import read_base_model
    from loraplex.contracts.artifacts.hash_model import is_hash_spec

    try:
        return read_base_model(path, name, quantize, kv_cache_dtype)
    except ArtifactError as error:
        if error.subject in ("--quantize", "--kv-cache-dtype"):
            raise CommandError(str(error)) from error
        lost = not is_hash_spec(path) and not Path(path).is_dir()
        hint = "; give a transformers directory with safetensors weights, a GGUF file, or hash:?..." if lost else ""
        if error.subject.endswith(".json"):
            raise CommandError(f"{Path(path) / error.subject}: {error.message}") from error
        raise CommandError(f"{path}: {error.message}{hint}" if path not in str(error) else f"{error}{hint}") from error


def check_quantization(quantize: str, device: str) -> None:
    """Check that a device computes with a scheme. Raises CommandError."""
    from loraplex.contracts.artifacts import ArtifactError
    from loraplex.contracts.artifacts.quantization import check_device, parse_quantization

    try:
        check_device(parse_quantization(quantize), device)
    except ArtifactError as error:
        raise CommandError(str(error)) from error


def registered(model: ModelManifest) -> BaseModel:
    """Convert a manifest to the SDK's class."""
    from loraplex_client import BaseModel, GenerationConfig, Module

    modules = tuple(Module(*dataclasses.astuple(module)) for module in model.modules)
    own = {"files", "create_time", "state", "modules", "generation_config"}
    names = {field.name for field in dataclasses.fields(BaseModel)} - own
    config = GenerationConfig(**model.generation_config.given)
    return BaseModel(modules=modules, generation_config=config, **{name: getattr(model, name) for name in names})


def layer_count(model: BaseModel) -> int:
    """Count the layers: the different beginnings of modules' names up to the first number, as in `model.layers.0.`."""
    matches = (re.match(r".*?\b\d+\.", module.name) for module in model.modules)
    return len({match[0] for match in matches if match})


def _model_json(model: BaseModel) -> dict[str, Any]:
    counts = {"layers": layer_count(model), "modules": len(model.modules)}
    fields = {name: value for name, value in vars(model).items() if name not in ("create_time", "end_token_ids")}
    config = {name: value for name, value in vars(model.generation_config).items() if value is not None}
    return {**fields, **counts, "files": [file.name for file in model.files], "generation_config": config}
