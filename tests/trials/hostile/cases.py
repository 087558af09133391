"""The table of hostile calls: what is sent to which method, and whether it may be served after all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.adapters.v1 import adapters_pb2 as store_pb
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.cluster.v1 import cluster_pb2
from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex.runtime.tenancy.permissions import PERMISSIONS

TENANT = "mallory"
INFERENCE = "/loraplex.inference.v1.InferenceService/"
STORE = "/loraplex.adapters.v1.AdapterService/"
CLUSTER = "/loraplex.cluster.v1.ClusterService/"
ADMIN = "/loraplex.admin.v1."
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A call: its messages as bytes, in order. `served`: an answer is as good as a refusal."""

    name: str
    method: str
    messages: tuple[bytes, ...]
    served: bool = False
    metadata: Metadata = ((TENANT_KEY, TENANT),)


# Bytes that are no message of any method: invalid UTF-8, fields cut short, a group without an end, a long varint.
_NO_MESSAGES = (
    b"\x0a\x02\xff\xfe",
    b"\x0a\x7f",
    b"\x0b",
    b"\x0a" + b"\xff" * 9 + b"\x01",
    b"\x12\x05\x0a\x03\xed\xa0\x80",
)


def broken_messages() -> Iterator[Case]:
    """Yield bytes that are no message, for every method of a router and a store."""
    services = (INFERENCE, STORE, CLUSTER, ADMIN)
    for method in sorted(name for name in PERMISSIONS if name.startswith(services)):
        for index, data in enumerate(_NO_MESSAGES):
            # Where a message's field 2 is unknown or no string, the last of them is a message.
            yield Case(f"{method.rpartition('/')[2]}: bytes {index}", method, (data,), served=True)


def bad_metadata() -> Iterator[Case]:
    """Yield calls whose tenant is none, or several, or too long."""
    values: dict[str, Metadata] = {
        "none": (),
        "two": ((TENANT_KEY, "acme"), (TENANT_KEY, "globex")),
        "upper case": ((TENANT_KEY, "ACME"),),
        "a path": ((TENANT_KEY, "../acme"),),
        "spaces": ((TENANT_KEY, "a b"),),
        "long": ((TENANT_KEY, "a" * 64),),
        "quotes": ((TENANT_KEY, "a'\"{}"),),
        "large": ((TENANT_KEY, "acme"), ("x-large", "a" * 20_000)),
    }
    tokenize, adapters = pb.TokenizeRequest(prompt="x"), store_pb.ListAdaptersRequest()
    for name, metadata in values.items():
        yield Case(f"tenant: {name}", f"{INFERENCE}Tokenize", (tokenize.SerializeToString(),), metadata=metadata)
        yield Case(f"tenant: {name}", f"{STORE}ListAdapters", (adapters.SerializeToString(),), metadata=metadata)


_NAMES = (
    "../../etc/passwd",
    "tenants/acme/adapters/secret",
    "tenants//adapters/",
    "tenants/acme/adapters/../../x",
    "a@b@c",
    "@live",
    "a@sha256:" + "g" * 64,
    "a@sha256:" + "0" * 64,
    "A",
    "é",
    "a\0b",
    "a\nb",
    "a" * 100_000,
    "tenants/" + "a" * 63 + "/adapters/" + "b" * 63,
    "'; DROP TABLE adapters; --",
)


def bad_names() -> Iterator[Case]:
    """Yield names of adapters, revisions, pages and workers that are none, or of others."""
    for index, name in enumerate(_NAMES):
        shown = f"name {index}"
        spec = pb.GenerateSpec(prompt="x", adapter=name, stopping=pb.Stopping(max_tokens=1))
        yield Case(shown, f"{INFERENCE}Generate", (pb.GenerateRequest(spec=spec).SerializeToString(),))
        yield Case(shown, f"{STORE}GetAdapter", (store_pb.GetAdapterRequest(name=name).SerializeToString(),))
        deleted = store_pb.DeleteAdapterRequest(name=name)
        yield Case(shown, f"{STORE}DeleteAdapter", (deleted.SerializeToString(),))
        revision = store_pb.DownloadRevisionRequest(name=f"{name}/revisions/sha256:{'0' * 64}")
        yield Case(shown, f"{STORE}DownloadRevision", (revision.SerializeToString(),))
        warm = cluster_pb2.WarmAdapterRequest(adapter=name)
        yield Case(shown, f"{CLUSTER}WarmAdapter", (warm.SerializeToString(),))
    for token in ("x", "e30=", "W10=", "WzFd", "WyJhIl0=", "\u202e", "A" * 100_000, "W1tbW1tbW1tb"):
        page = store_pb.ListAdaptersRequest(page_token=token, page_size=-1)
        yield Case(f"page {token[:8]}", f"{STORE}ListAdapters", (page.SerializeToString(),))
        page = store_pb.ListAdaptersRequest(page_token=token)
        yield Case(f"page {token[:8]}", f"{STORE}ListAdapters", (page.SerializeToString(),), served=token == "WyJhIl0=")
    masks = store_pb.GetBaseModelRequest(name="hash")
    masks.read_mask.paths.extend(["name", "nothing.at.all", ""])
    yield Case("mask", f"{STORE}GetBaseModel", (masks.SerializeToString(),))
    drained = cluster_pb2.DrainWorkerRequest(worker_id="*")
    yield Case("every worker", f"{CLUSTER}DrainWorker", (drained.SerializeToString(),))
    for name in ("", "main", "*", "../main", "main\x00", "m" * 100_000):
        cell = cluster_pb2.DrainCellRequest(cell=name)
        yield Case(f"cell {name[:8]!r}", f"{CLUSTER}DrainCell", (cell.SerializeToString(),))
        served = name == "main"
        yield Case(f"cell {name[:8]!r}", f"{CLUSTER}OpenCell", (cell.SerializeToString(),), served=served)
