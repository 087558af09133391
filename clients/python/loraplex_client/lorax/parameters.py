"""LoRAX's parameters, addresses and headers, as the SDK's own client takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from loraplex_client.endpoint import TENANT_KEY
from loraplex_client.errors import InvalidRequestError
from loraplex_client.lorax.types import MergedAdapters, MergeStrategy, ResponseFormat
from loraplex_client.options import GenerateOptions


def options_of(given: Mapping[str, Any], adapter_id: str | None, most: int) -> GenerateOptions:
    """Return a request's options for parameters of LoRAX. Raises InvalidRequestError."""
    options: dict[str, Any] = {
        name: given[name]
        for name in ("best_of", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")
        if name in given
    }
    options |= {"adapter_id": adapter_id, "max_new_tokens": most, "stop": list(given.get("stop_sequences", ()))}
    options |= {"ignore_eos": given.get("ignore_eos_token"), "logprobs": given.get("return_k_alternatives", 0)}
    if "truncate" in given:
        # 0 means to Loraplex: to what the context leaves.
        if not isinstance(given["truncate"], int) or given["truncate"] < 1:
            raise InvalidRequestError("truncate: must be at least 1", field="truncate")
        options["truncate_prompt_tokens"] = given["truncate"]
    if given.get("merged_adapters") is not None:
        if adapter_id is not None:
            raise InvalidRequestError("merged_adapters: give either this or adapter_id", field="merged_adapters")
        options["adapters"] = _merged(given["merged_adapters"])
    shapes = {name: given[name] for name in ("top_k", "top_p", "typical_p") if name in given}
    temperature = float(given.get("temperature", 1.0))
    if given.get("do_sample") or shapes or temperature != 1.0:
        options |= {"temperature": temperature, **shapes}
    return cast(GenerateOptions, options)


def schema_of(given: ResponseFormat | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a format as the SDK's own client takes it."""
    if given is None or isinstance(given, Mapping):
        return given
    return {"type": given.type, **({} if given.schema is None else {"schema": given.schema})}


def _merged(given: MergedAdapters | Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return a weighted set. Raises InvalidRequestError on a strategy that is not a sum."""
    fields = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    # `density` and `majority_sign_method` are of other strategies; LoRAX's own client sends a density always.
    strategy = fields.get("merge_strategy") or MergeStrategy.LINEAR
    if strategy != MergeStrategy.LINEAR:
        raise InvalidRequestError(
            f"merged_adapters.merge_strategy: {strategy!r} is not served, only 'linear'",
            field="merged_adapters.merge_strategy",
        )
    try:
        return list(zip(fields["ids"], fields["weights"], strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"merged_adapters: each of ids needs one of weights: {error}", field="merged_adapters"
        ) from error


def addresses_of(base_url: str) -> str:
    """Return HOST:PORT of http://HOST:PORT/, or of each of several with commas."""
    found = []
    for url in base_url.split(","):
        parts = urlsplit(url.strip() if "://" in url else f"http://{url.strip()}")
        if parts.scheme != "http" or not parts.netloc:
            raise InvalidRequestError(f"base_url: {url!r} is not http://HOST:PORT of a router", field="base_url")
        found.append(parts.netloc)
    return ",".join(found)


def tenant_of(headers: Mapping[str, str] | None) -> str:
    """Return the tenant that a client's headers name; empty for none."""
    return _lowered(headers).get(TENANT_KEY, "")


def key_of(headers: Mapping[str, str] | None) -> str | None:
    """Return the key or token in a client's headers; None for none."""
    scheme, _, key = _lowered(headers).get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _lowered(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {name.lower(): value for name, value in (headers or {}).items()}
