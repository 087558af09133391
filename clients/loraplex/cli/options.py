"""Options that several commands share, and the words that a running cluster completes them with.

The options' variables avoid the servers' prefixes (LORAPLEX_ROUTER_...), because servers refuse unknown variables.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.service import cluster_service
from loraplex.cli.terminal import CommandError

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

# Names of the variables that hold credentials; those in loraplex_client.endpoint are slow to import.
KEY_VARIABLE, KEY_FILE_VARIABLE = "LORAPLEX_API_KEY", "LORAPLEX_API_KEY_FILE"
CA_VARIABLE, CERT_VARIABLE, CERT_KEY_VARIABLE = "LORAPLEX_CA", "LORAPLEX_CERT", "LORAPLEX_KEY"
CREDENTIAL_VARIABLES = (KEY_VARIABLE, KEY_FILE_VARIABLE, CA_VARIABLE, CERT_VARIABLE, CERT_KEY_VARIABLE)

ROUTER = "127.0.0.1:50051"
STORE = "127.0.0.1:50052"
# The credential's tenant; without a credential `default`.
TENANT = ""
# Seconds of the units that times of flags are written in.
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
# Timeout in seconds of a completion, for which the shell waits. A cluster that does not answer completes nothing.
# Nothing is printed either: it would appear in the line that is typed.
_ASK_S = 1.0


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the adapters that the tenant may use, and those with an alias, as a request names them."""
    from loraplex_client import LoraplexError, StoreClient

    address = _value(context, "store", "LORAPLEX_STORE_ADDRESS", STORE)
    names = set()
    with suppress(LoraplexError), StoreClient(address, _tenant(context), timeout_s=_ASK_S) as store:
        for adapter in store.list():
            name = adapter.name.split("/", 3)[3]
            names |= {name if alias == "live" else f"{name}@{alias}" for alias in adapter.aliases}
    return sorted(name for name in names if name.startswith(incomplete))


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the base models that the router serves."""
    from loraplex_client import Client, LoraplexError

    with suppress(LoraplexError), Client(_router(context), _tenant(context), timeout_s=_ASK_S) as client:
        return [model.name for model in client.models() if model.name.startswith(incomplete)]
    return []


def worker_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return the live workers of the router."""
    with suppress(CommandError):
        service = cluster_service(_router(context), _tenant(context), _ASK_S)
        workers = service.ask("ListWorkers").workers
        return [worker.worker_id for worker in workers if worker.worker_id.startswith(incomplete)]
    return []


def _router(context: typer.Context) -> str:
    return _value(context, "router", "LORAPLEX_ADDRESS", ROUTER)


def _tenant(context: typer.Context) -> str:
    return _value(context, "tenant", "LORAPLEX_TENANT", TENANT)


def _value(context: typer.Context, flag: str, variable: str, default: str) -> str:
    """Return a flag's value: from the typed line, the environment or its default, in this order."""
    return str(context.params.get(flag) or os.environ.get(variable) or default)


RouterOption = Annotated[
    str,
    typer.Option(
        "--router",
        metavar="HOST:PORT[,...]",
        envvar="LORAPLEX_ADDRESS",
        help="Addresses of routers, separated by commas; if one is lost, the next continues.",
    ),
]
StoreOption = Annotated[
    str,
    typer.Option("--store", metavar="HOST:PORT", envvar="LORAPLEX_STORE_ADDRESS", help="Address of the adapter store."),
]
TenantOption = Annotated[
    str, typer.Option("--tenant", metavar="NAME", envvar="LORAPLEX_TENANT", help="Tenant to act for.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", help="Base model, needed if the router serves several.", autocompletion=model_names
    ),
]
NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="NAME, or tenants/TENANT/adapters/NAME.", autocompletion=adapter_names),
]
AdapterOption = Annotated[
    str,
    typer.Option(
        "--adapter",
        "-a",
        metavar="NAME",
        help="NAME, NAME@ALIAS or a full name; default: the base model.",
        autocompletion=adapter_names,
    ),
]
AdaptersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        "-a",
        metavar="NAME[=WEIGHT]",
        help="NAME, NAME@ALIAS or a full name; default: the base model. Repeatable: a weighted sum.",
        autocompletion=adapter_names,
    ),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        envvar=KEY_FILE_VARIABLE,
        help=f"File with an API key or a token; {KEY_VARIABLE} may have the key itself.",
    ),
]
CaOption = Annotated[
    str,
    typer.Option(
        "--ca",
        metavar="FILE",
        envvar=CA_VARIABLE,
        help="Use TLS, with the authority of the servers' certificates; `system`: the system's.",
    ),
]
CertOption = Annotated[
    Path | None, typer.Option("--cert", metavar="FILE", envvar=CERT_VARIABLE, help="The client's certificate.")
]
KeyOption = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", envvar=CERT_KEY_VARIABLE, help="The private key of --cert.")
]
QuantizeOption = Annotated[
    str,
    typer.Option(
        "--quantize",
        metavar="SCHEME",
        help="Scheme of the weights: int8, int8-zero-point, int4, int4-64, int4-128, on a CPU int8-dynamic and "
        "int4-dynamic, on CUDA fp8; with +embeddings, as in int8+embeddings, of token embeddings and output head too.",
    ),
]
KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="NAME",
        help="int8: an 8-bit KV cache; default: the model's dtype.",
    ),
]
SpeculativeConfigOption = Annotated[
    str,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='Drafts of tokens that a step checks: {"method":"suffix","num_speculative_tokens":8}, or off.',
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Maximum tokens of the answer; default: the model's, else 128."),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        metavar="T", help="Sampling temperature; 0: greedy; default: the model's (`loraplex models list`), else 0."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def read_adapters(texts: list[str]) -> tuple[str | None, list[tuple[str, float]] | None]:
    """Parse --adapter: a single name, or several with weights, such as `a=0.5` and `b`."""
    if not any(texts):
        return None, None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0], None
    pairs = []
    for text in texts:
        name, equals, weight = text.partition("=")
        try:
            pairs.append((name, float(weight) if equals else 1.0))
        except ValueError:
            raise typer.BadParameter(f"{text}: {weight!r} is not a number", param_hint="--adapter") from None
    return None, pairs


def read_seconds(flag: str, text: str) -> float:
    """Return the seconds in a text such as 90d or 12h. Raises CommandError."""
    number, unit = text[:-1], text[-1:]
    try:
        return float(number) * _UNITS[unit]
    except (KeyError, ValueError) as error:
        raise CommandError(f"{flag} {text}: write a number and s, m, h or d, such as 90d") from error


def read_duration(flag: str, text: str) -> Duration:
    """Return the time in a text such as 90d or 12h. Raises CommandError."""
    from google.protobuf.duration_pb2 import Duration

    duration = Duration()
    try:
        duration.FromNanoseconds(int(read_seconds(flag, text) * 1e9))
    except (OverflowError, ValueError) as error:
        raise CommandError(f"{flag} {text}: too long") from error
    return duration
