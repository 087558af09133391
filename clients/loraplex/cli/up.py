"""`loraplex up`: runs a whole cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.options import (
    CA_VARIABLE,
    CREDENTIAL_VARIABLES,
    KEY_FILE_VARIABLE,
    KvCacheOption,
    QuantizeOption,
    SpeculativeConfigOption,
)
from loraplex.cli.terminal import CommandError

# Parameters of `up` that workers and routers have as flags of the same name.
_OF_WORKERS = (
    *("device", "dtype", "tensor_parallel", "quantize", "kv_cache_dtype", "speculative_config"),
    *("rows", "max_rank", "adapter_slots", "kv_blocks"),
)
_OF_ROUTERS = ("engine_protocol", "engine_tenant", "engine_adapter")


def up(  # noqa: PLR0913, PLR0917  # one parameter a flag
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A transformers directory, a GGUF file, or hash:? (a test engine).")
    ],
    adapters: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="peft adapters in DIR/TENANT/NAME/; shared adapters in DIR/NAME/."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name that requests use for the model; default: the directory's.")
    ] = "",
    update: Annotated[bool, typer.Option("--update", help="Make changed adapters of the directory live.")] = False,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Number of workers.")] = 1,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Maximum sequences that a worker computes at once; default: 32, on CUDA 256."
        ),
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum rank of an adapter; default: 64.")
    ] = None,
    adapter_slots: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Adapters on a worker's device at once; default: 32.")
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Blocks of a worker's KV cache; default: what memory allows.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The router's port; 0 for any free port.")
    ] = 50051,
    router_processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of router processes behind that port.")
    ] = 1,
    store_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The store's port; 0 for any free port.")
    ] = 50052,
    http: Annotated[
        int | None,
        typer.Option(
            "--http",
            min=0,
            max=65535,
            metavar="PORT",
            help="Also start an HTTP gateway on this port; 0 for any free port.",
        ),
    ] = None,
    engine_protocol: Annotated[str, typer.Option(metavar="NAME", help="Also serve these: sglang, vllm.")] = "",
    engine_tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant of that protocol's calls.")] = "default",
    engine_adapter: Annotated[
        str, typer.Option(metavar="NAME", help="Adapter of that protocol's calls without lora_id.")
    ] = "",
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")] = "cpu",
    tensor_parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Devices that share a worker's model.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")] = "auto",
    quantize: QuantizeOption = "",
    kv_cache_dtype: KvCacheOption = "",
    speculative_config: SpeculativeConfigOption = "",
    redis_url: Annotated[
        str,
        typer.Option(envvar="LORAPLEX_REDIS_URL", metavar="URL", help="Redis server; default: start a Valkey."),
    ] = "",
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for adapters, caches and logs; default: temporary.")
    ] = None,
    secured: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Use TLS and API keys; certificates, keys and data are in DIR, made if missing.",
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --secured: tenants to set up, as `loraplex tenants apply` does."),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Stream answers of adapters and of the base model, to DIR/questions.jsonl if it exists."
        ),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Run the demo, then stop.")] = False,
) -> None:
    """Start a cluster on this machine: Valkey, adapter store, router, workers. Ctrl-C drains and stops all of it.

    Registers the model, uploads the adapters that the store lacks, and prints `ready router=HOST:PORT
    store=HOST:PORT` when it serves. With --data-dir the adapters, their aliases and the logs are kept; keys of Redis,
    and so requests that wait, are not.

    [bold]loraplex up --model ./Qwen2-0.5B --adapters ./adapters --workers 2[/]
    """
    values = locals()
    from loraplex.cli.demo import read_questions
    from loraplex.cli.gguf_models import local_model
    from loraplex.cli.launch import LaunchPlan, check_engine_protocol, launch
    from loraplex.cli.local import ClusterSettings
    from loraplex.cli.models import check_quantization, read_model
    from loraplex.cli.tenants import read_tenants
    from loraplex.cli.upload_tree import AdapterTree, find_adapters

    os.umask(0o077)  # what it writes is for its own user
    for variable in CREDENTIAL_VARIABLES:  # of another cluster: this one has none
        os.environ.pop(variable, None)
    # Refuse bad arguments before any process starts.
    model, name = local_model(model, name, dtype)
    base = read_model(model, name, quantize, kv_cache_dtype)
    check_quantization(quantize, device)
    tree = AdapterTree() if adapters is None else find_adapters(adapters)
    check_engine_protocol(engine_protocol)
    if tenants is not None and secured is None:
        raise CommandError("--tenants: give --secured DIR too; without credentials any caller may name any tenant")
    specs, prices = ([], None) if tenants is None else read_tenants(tenants)
    if secured is not None:
        use_credentials(secured)
        data_dir = data_dir or secured / "data"
    settings = ClusterSettings(
        model=model,
        model_name=base.name,
        workers=workers,
        port=port,
        store_port=store_port,
        http_port=http,
        redis_url=redis_url,
        data_dir=data_dir,
        credentials=secured,
        worker_flags=_flags(values, _OF_WORKERS),
        router_flags=(f"--processes={router_processes}", *_flags(values, _OF_ROUTERS if engine_protocol else ())),
    )
    shown = demo or once
    asked = read_questions(adapters) if shown else ()
    plan = LaunchPlan(
        settings,
        base,
        tree,
        update=update,
        demo=shown,
        once=once,
        tenants=tuple(specs),
        prices=prices,
        questions=asked,
    )
    asyncio.run(launch(plan))


def _flags(values: Mapping[str, object], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={values[name]}" for name in names if values[name] not in (None, ""))


def use_credentials(directory: Path) -> None:
    """Make the certificates and the first operator's key that the directory lacks, and call with that key."""
    from loraplex.cli.credentials import make_credentials, make_first_key
    from loraplex.cli.development_ca import DevelopmentCa
    from loraplex.cli.local import FIRST_KEY

    if not (directory / "ca.pem").exists():
        make_credentials(directory)
    elif not (directory / "batches.pem").exists() and (directory / "ca-key.pem").exists():  # made before 0.2
        ca = DevelopmentCa.read(directory)
        ca.write(directory, "batches", ca.issue("loraplex://batches/batches"))
    if not (directory / FIRST_KEY).exists():
        make_first_key(directory / FIRST_KEY)
    os.environ |= {CA_VARIABLE: str(directory / "ca.pem"), KEY_FILE_VARIABLE: str(directory / FIRST_KEY)}
