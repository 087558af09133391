"""`loraplex models`: registers and lists the adapter store's base models."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import STORE, TENANT, JsonOption, KvCacheOption, QuantizeOption, StoreOption, TenantOption
from clients.cli.service import store_client
from clients.cli.terminal import Columns, CommandError, print_table, say

if TYPE_CHECKING:
    from loraplex_client import BaseModel

    import artifacts.base_model

app = typer.Typer(no_args_is_help=True, help="Register and list base models.")


@app.command()
def push(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A transformers directory, or hash:?... for the hash model.")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name to register; the directory's by default.")] = "",
    quantize: QuantizeOption = "",
    kv_cache_dtype: KvCacheOption = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace another model of that name.")] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Register a base model: its manifest and small files. The weights stay on the workers' disks.

    With --quantize or --kv-cache-dtype the model's workers need the same flag.
    """
    model = read_model(path, name, quantize, kv_cache_dtype)
    with store_client(store, tenant) as client:
        client.register_model(registered(model), model.files, replace=replace)
    say(f"registered {model.name} {model.digest}")


@app.command("list")
def list_(tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the registered base models."""
    with store_client(store, tenant) as client:
        models = client.models()
    columns: Columns = {
        "model": "name",
        "architecture": "architecture",
        "context": "context_length",
        "vocabulary": "vocab_size",
        "layers": "layers",
        "weights": lambda model: model["quantization"] or "as given",
        "KV cache": lambda model: model["kv_cache_dtype"] or "as computed",
        "digest": lambda model: model["digest"][:19],
    }
    print_table(map(_model_json, models), columns, as_json=as_json)


def read_model(path: str, name: str, quantize: str = "", kv_cache_dtype: str = "") -> artifacts.base_model.BaseModel:
    """Read the manifest of the model at `path`. Raises CommandError."""
    from artifacts import ArtifactError
    from artifacts.base_model import read_base_model
    from artifacts.hash_model import is_hash_spec

    try:
        return read_base_model(path, name, quantize, kv_cache_dtype)
    except ArtifactError as error:
        if error.subject in ("--quantize", "--kv-cache-dtype"):
            raise CommandError(str(error)) from error
        lost = not is_hash_spec(path) and not Path(path).is_dir()
        hint = "; give a transformers directory with safetensors weights, or hash:?..." if lost else ""
        raise CommandError(f"{path}: {error.message}{hint}" if path not in str(error) else f"{error}{hint}") from error


def check_quantization(quantize: str, device: str) -> None:
    """Check that a device computes with a scheme. Raises CommandError."""
    from artifacts import ArtifactError
    from artifacts.quantization import check_device, parse_quantization

    try:
        check_device(parse_quantization(quantize), device)
    except ArtifactError as error:
        raise CommandError(str(error)) from error


def registered(model: artifacts.base_model.BaseModel) -> BaseModel:
    """Convert a manifest to the SDK's class."""
    from loraplex_client import BaseModel, Module

    modules = tuple(Module(module.name, module.in_features, module.out_features) for module in model.modules)
    names = {field.name for field in dataclasses.fields(BaseModel)} - {"files", "create_time", "modules"}
    return BaseModel(modules=modules, **{name: getattr(model, name) for name in names})


def layer_count(model: BaseModel) -> int:
    """Count the layers: the different beginnings of modules' names up to the first number, as in `model.layers.0.`."""
    matches = (re.match(r".*?\b\d+\.", module.name) for module in model.modules)
    return len({match[0] for match in matches if match})


def _model_json(model: BaseModel) -> dict[str, Any]:
    counts = {"layers": layer_count(model), "modules": len(model.modules)}
    fields = {name: value for name, value in vars(model).items() if name not in ("create_time", "end_token_ids")}
    return {**fields, **counts, "files": [file.name for file in model.files]}
