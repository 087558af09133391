"""An API server of Kubernetes, as far as an operator can tell: objects of the chart's definitions, and events.

Like the real one it checks objects against their definition's schema and its rules, counts versions and generations,
keeps status and the rest apart, waits for finalizers, refuses stale patches, and tells every change after a version to
those who watch.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cel
import jsonpatch
import jsonschema  # type: ignore[import-untyped]
import yaml
from aiohttp import web

CRDS = Path(__file__).parents[3] / "deploy" / "chart" / "crds"
Object = dict[str, Any]
Key = tuple[str, str, str]
_CORE = ("", "v1")
_PATH = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+)(?:/(status))?)?")


class Refusal(Exception):
    """A request that is refused with a status of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """Serves objects by plural, namespace and name. `on_call` is awaited before and after each request but watches."""

    def __init__(self) -> None:
        definitions = [yaml.safe_load(path.read_text())["spec"] for path in sorted(CRDS.glob("*.yaml"))]
        self.groups = {one["names"]["plural"]: (one["group"], one["versions"][0]["name"]) for one in definitions}
        self.kinds = {one["names"]["plural"]: one["names"]["kind"] for one in definitions} | {"events": "Event"}
        self._schemas = {
            one["names"]["plural"]: _strict(one["versions"][0]["schema"]["openAPIV3Schema"]) for one in definitions
        }
        self.objects: dict[Key, Object] = {}
        # All changes: version, key, and the event that watches get.
        self._log: list[tuple[int, Key, Object]] = []
        self._changed = asyncio.Event()
        self.on_call: Callable[[str], Awaitable[None]] = _nothing

    async def __aenter__(self) -> KubernetesApi:
        """Listen."""
        application = web.Application(middlewares=[self._answer])
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a configuration of kubectl."""
        cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        users = [{"name": "test", "user": {"token": "secret"}}]
        config = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "test"}
        path.write_text(json.dumps(config))
        return path

    def apply(self, kind: str, name: str, namespace: str = "llm", **spec: Any) -> None:
        """Do as `kubectl apply` does. Raises Refusal."""
        plural = next(plural for plural, each in self.kinds.items() if each == kind)
        group, version = self.groups[plural]
        key = (plural, namespace, name)
        manifest = {
            "apiVersion": f"{group}/{version}",
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
        if key in self.objects:
            self._update(key, {**self.objects[key], "spec": spec}, "")
        else:
            self._create(plural, namespace, manifest)

    def get(self, name: str, plural: str = "loraadapters", namespace: str = "llm") -> Object | None:
        """Return an object; None where there is none."""
        return self.objects.get((plural, namespace, name))

    def delete(self, name: str, plural: str = "loraadapters", namespace: str = "llm") -> None:
        """Do as `kubectl delete --wait=false` does."""
        key = (plural, namespace, name)
        found = deepcopy(self._get(key))
        if not found["metadata"].get("finalizers"):
            self._put(key, found, "DELETED")
        elif "deletionTimestamp" not in found["metadata"]:
            found["metadata"]["deletionTimestamp"] = _now()
            self._put(key, found, "MODIFIED")

    def events(self, name: str) -> list[str]:
        """Return the reasons of an object's events, in order."""
        found = [each for (plural, _, _), each in self.objects.items() if plural == "events"]
        return [each["reason"] for each in found if each["involvedObject"]["name"] == name]

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        """Wait until a condition holds after a change. Raises TimeoutError with what the objects are."""
        try:
            async with asyncio.timeout(30):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            objects = [each for (plural, _, _), each in self.objects.items() if plural != "events"]
            raise TimeoutError(f"{what}: {json.dumps(objects, indent=1)}") from None

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        watches = "watch" in request.query
        try:
            if not watches:
                await self.on_call(f"{request.method} {request.path}")
            answer: web.StreamResponse = await handler(request)
        except Refusal as refusal:
            answer = web.json_response(
                {"kind": "Status", "code": refusal.status, "message": str(refusal)}, status=refusal.status
            )
        if not watches:
            await self.on_call(f"after {request.method} {request.path}")
        return answer

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if (match := _PATH.fullmatch(request.path)) is None:
            return web.json_response(self._discovery(request.path))
        namespace, plural, name, subresource = match[1], match[2], match[3], match[4] or ""
        if plural not in self.kinds:
            raise Refusal(404, f"no resource {plural}")
        key = (plural, namespace, name)
        match request.method:
            case "GET" if "watch" in request.query:
                return await self._watch(request, plural, namespace)
            case "GET" if name is None:
                items = [each for (p, n, _), each in self.objects.items() if (p, n) == (plural, namespace)]
                return web.json_response({"items": items, "metadata": {"resourceVersion": str(len(self._log))}})
            case "GET":
                return web.json_response(self._get(key))
            case "POST":
                return web.json_response(self._create(plural, namespace, await request.json()), status=201)
            case "PATCH":
                patched = _patched(self._get(key), request.content_type, await request.json())
                return web.json_response(self._update(key, patched, subresource))
        raise Refusal(405, f"no {request.method}")

    def _discovery(self, path: str) -> Object:
        def resources(of: tuple[str, str]) -> list[Object]:
            named = {"namespaces": "Namespace", "events": "Event"} if of == _CORE else {}
            named |= {plural: self.kinds[plural] for plural, group in self.groups.items() if group == of}
            both = [(plural, kind, "") for plural, kind in named.items()]
            both += [(plural, kind, "/status") for plural, kind in named.items() if of != _CORE]
            return [
                {
                    "name": plural + sub,
                    "kind": kind,
                    "singularName": kind.lower(),
                    "namespaced": plural != "namespaces",
                    "verbs": ["get", "list", "watch", "patch", "create"],
                }
                for plural, kind, sub in both
            ]

        (group,) = set(self.groups.values())
        served = {"groupVersion": "/".join(group), "version": group[1]}
        answers: dict[str, Object] = {
            "/api": {"versions": ["v1"]},
            "/api/v1": {"resources": resources(_CORE)},
            "/apis": {"groups": [{"name": group[0], "preferredVersion": served, "versions": [served]}]},
            f"/apis/{group[0]}/{group[1]}": {"resources": resources(group)},
        }
        if path not in answers:
            raise Refusal(404, f"no {path}")
        return answers[path]

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        response, after = web.StreamResponse(), int(request.query.get("resourceVersion", "0"))
        await response.prepare(request)
        while True:
            changed = self._changed
            for version, (p, n, _), event in self._log[after:]:
                after = version
                if (p, n) == (plural, namespace):
                    await response.write(json.dumps(event).encode() + b"\n")
            await changed.wait()

    def _get(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refusal(404, f"no {'/'.join(key)}")
        return self.objects[key]

    def _create(self, plural: str, namespace: str, manifest: Object) -> Object:
        metadata = manifest["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{uuid.uuid4().hex[:8]}"
        given = {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        created = {**manifest, "metadata": {**metadata, **given, "generation": 1}}
        created.pop("status", None)
        if (plural, namespace, name) in self.objects:
            raise Refusal(409, f"{name} exists")
        self._check(plural, created, None)
        return self._put((plural, namespace, name), created, "ADDED")

    def _update(self, key: Key, patched: Object, subresource: str) -> Object:
        former, changed = self.objects[key], deepcopy(patched)
        if subresource:
            changed = {**deepcopy(former), "status": changed.get("status", {})}
        else:
            changed.pop("status", None)
            if "status" in former:
                changed["status"] = deepcopy(former["status"])
            for field in ("uid", "creationTimestamp", "deletionTimestamp", "generation", "resourceVersion"):
                changed["metadata"].pop(field, None)
                if field in former["metadata"]:
                    changed["metadata"][field] = former["metadata"][field]
        if changed.get("spec") != former.get("spec"):
            changed["metadata"]["generation"] += 1
        if changed == former:
            return former
        self._check(key[0], changed, former)
        gone = "deletionTimestamp" in changed["metadata"] and not changed["metadata"].get("finalizers")
        return self._put(key, changed, "DELETED" if gone else "MODIFIED")

    def _check(self, plural: str, manifest: Object, former: Object | None) -> None:
        if plural in self._schemas:
            for error in jsonschema.Draft202012Validator(self._schemas[plural]).iter_errors(manifest):
                raise Refusal(422, f"{error.json_path}: {error.message}")
            for message in broken_rules(self._schemas[plural], manifest, former):
                raise Refusal(422, message)

    def _put(self, key: Key, changed: Object, kind: str) -> Object:
        version = len(self._log) + 1
        changed["metadata"]["resourceVersion"] = str(version)
        self._log.append((version, key, {"type": kind, "object": changed}))
        if kind == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = changed
        changing, self._changed = self._changed, asyncio.Event()
        changing.set()
        return changed


async def _nothing(call: str) -> None:
    """Do nothing at a call."""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _patched(former: Object, content_type: str, patch: Any) -> Object:
    if content_type == "application/merge-patch+json":
        return _merged(former, patch)
    try:
        patched: Object = jsonpatch.apply_patch(former, patch)
    except jsonpatch.JsonPatchException as error:
        raise Refusal(422, str(error)) from error
    return patched


def _merged(former: Object, patch: Mapping[str, Any]) -> Object:
    """Return an object after a merge patch (RFC 7386)."""
    merged = dict(former)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            of = merged.get(name)
            merged[name] = _merged(of if isinstance(of, dict) else {}, value)
        else:
            merged[name] = value
    return merged


def rules_of(schema: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """Return the rules of a schema and of what it consists of: `rule`, in CEL, and `message`."""
    yield from schema.get("x-kubernetes-validations", ())
    for each in schema.get("properties", {}).values():
        yield from rules_of(each)
    if items := schema.get("items"):
        yield from rules_of(items)


def broken_rules(schema: Mapping[str, Any], value: Any, former: Any) -> Iterator[str]:
    """Return the messages of the rules that a value breaks. Those of changes hold where there was a value before."""
    for each in schema.get("x-kubernetes-validations", ()):
        known = {"self": value} if former is None else {"self": value, "oldSelf": former}
        if ("oldSelf" not in each["rule"] or former is not None) and cel.evaluate(each["rule"], known) is not True:
            yield each["message"]
    for name, of in schema.get("properties", {}).items():
        if name in value:
            yield from broken_rules(of, value[name], (former or {}).get(name))
    assert not list(rules_of(schema.get("items", {}))), "items of lists have no rules yet"


def _strict(schema: Mapping[str, Any]) -> Object:
    """Return a schema that refuses the fields that Kubernetes drops, because nobody would notice that here."""
    strict = dict(schema)
    if properties := schema.get("properties"):
        strict["properties"] = {name: _strict(each) for name, each in properties.items()}
        strict["additionalProperties"] = False
    if items := schema.get("items"):
        strict["items"] = _strict(items)
    return strict
