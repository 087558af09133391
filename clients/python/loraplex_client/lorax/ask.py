"""A request as LoRAX's programs write it, and its answer as they read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast
from urllib.parse import urlsplit

from loraplex_client.endpoint import TENANT_KEY
from loraplex_client.errors import InvalidRequestError
from loraplex_client.generation import FinishReason as End
from loraplex_client.generation import Generation, Piece, TokenLogprobs
from loraplex_client.lorax.types import (
    AlternativeToken,
    Details,
    FinishReason,
    MergedAdapters,
    MergeStrategy,
    Parameters,
    Response,
    ResponseFormat,
    StreamDetails,
    StreamResponse,
    Token,
)
from loraplex_client.options import GenerateOptions

ADAPTER_SOURCES = ("hub", "local", "s3", "pbase")
DEFAULT_TOKENS = 20
_NOT_SERVED = ("watermark", "decoder_input_details")
_REASONS = {
    End.LENGTH: FinishReason.Length,
    End.END: FinishReason.EndOfSequenceToken,
    End.STOP: FinishReason.StopSequence,
    End.TOOL_CALLS: FinishReason.EndOfSequenceToken,
}


def options_of(arguments: Mapping[str, Any], adapter_id: str | None, most: int) -> GenerateOptions:
    """Return a request's options for parameters of LoRAX. Raises InvalidRequestError."""
    options: dict[str, Any] = {
        name: arguments[name]
        for name in ("best_of", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")
        if name in arguments
    }
    options |= {"adapter_id": adapter_id, "max_tokens": most, "stop": list(arguments.get("stop_sequences", ()))}
    options |= {"ignore_eos": arguments.get("ignore_eos_token"), "logprobs": arguments.get("return_k_alternatives", 0)}
    if "truncate" in arguments:
        # 0 means to Loraplex: to what the context leaves.
        if not isinstance(arguments["truncate"], int) or arguments["truncate"] < 1:
            raise InvalidRequestError("truncate: must be at least 1", field="truncate")
        options["truncate_prompt_tokens"] = arguments["truncate"]
    if arguments.get("merged_adapters") is not None:
        if adapter_id is not None:
            raise InvalidRequestError("merged_adapters: give either this or adapter_id", field="merged_adapters")
        options["adapters"] = _merged(arguments["merged_adapters"])
    shapes = {name: arguments[name] for name in ("top_k", "top_p", "typical_p") if name in arguments}
    temperature = float(arguments.get("temperature", 1.0))
    drawn = arguments.get("do_sample") or shapes or temperature != 1.0
    options |= {"temperature": temperature, **shapes} if drawn else {"temperature": 0.0}
    return cast(GenerateOptions, options)


def schema_of(form: ResponseFormat | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a format as the SDK's own client takes it."""
    if form is None or isinstance(form, Mapping):
        return form
    return {"type": form.type, **({} if form.schema is None else {"schema": form.schema})}


def _merged(adapters: MergedAdapters | Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return a weighted set. Raises InvalidRequestError on a strategy that is not a sum."""
    fields = dict(adapters) if isinstance(adapters, Mapping) else dict(vars(adapters))
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


def sdk_arguments(base_url: str, headers: Mapping[str, str] | None, timeout_s: float) -> dict[str, Any]:
    """Return the arguments of the SDK's own client for those of LoRAX's. Raises InvalidRequestError."""
    addresses = []
    for url in base_url.split(","):
        parts = urlsplit(url.strip() if "://" in url else f"http://{url.strip()}")
        if parts.scheme != "http" or not parts.netloc:
            raise InvalidRequestError(f"base_url: {url!r} is not http://HOST:PORT of a router", field="base_url")
        addresses.append(parts.netloc)
    lowered = {name.lower(): value for name, value in (headers or {}).items()}
    scheme, _, key = lowered.get("authorization", "").partition(" ")
    return {
        "address": ",".join(addresses),
        "tenant": lowered.get(TENANT_KEY, ""),
        "timeout_s": timeout_s,
        "api_key": key.strip() if scheme.lower() == "bearer" else None,
    }


class Ask:
    """A request: its options and format for the SDK's own client, and the responses made from its stream's pieces."""

    def __init__(self, prompt: str, adapter_id: str | None, adapter_source: str | None, parameters: Parameters) -> None:
        """Read LoRAX's arguments. Raises InvalidRequestError, and TypeError for an unknown one."""
        if adapter_source is not None and adapter_source not in ADAPTER_SOURCES:
            sources = ", ".join(ADAPTER_SOURCES)
            raise InvalidRequestError(
                f"adapter_source: {adapter_source!r} is none of {sources}", field="adapter_source"
            )
        arguments: dict[str, Any] = {name: value for name, value in parameters.items() if value is not None}
        for name, value in arguments.items():
            if name not in Parameters.__annotations__:
                raise TypeError(f"unexpected keyword argument {name!r}")
            if name in _NOT_SERVED and value:
                raise InvalidRequestError(f"{name}: not served", field=name)
        self._prefix = prompt if arguments.get("return_full_text") else ""
        self._seed: int | None = arguments.get("seed")
        self._with_details = bool(arguments.get("details", True))
        self._most = int(arguments.get("max_new_tokens", DEFAULT_TOKENS))
        self.options = options_of(arguments, adapter_id, self._most)
        self.format = schema_of(arguments.get("response_format"))
        self._count = 0
        self._held: Token | None = None

    def take(self, piece: Piece) -> Iterator[StreamResponse]:
        """Yield the responses of a piece.

        The last token's response carries the whole text. A token that may be the last waits for the next piece: a token
        without text, such as an end token, and the token that reaches the limit. Others are yielded at once.
        """
        if piece.finished is not None:
            yield from self._last(piece.finished)
            return
        for index, token_id in enumerate(piece.token_ids):
            if self._held is not None:
                yield StreamResponse(self._held)
            logprobs = piece.logprobs[index] if piece.logprobs else TokenLogprobs(0.0, ())
            # From an older router the first of several tokens has the text of all: the last may be an end token.
            text = piece.texts[index] if piece.texts else "" if index else piece.text
            others = tuple(AlternativeToken(other, logprob) for other, logprob in logprobs.alternatives)
            self._held = Token(token_id, text, logprobs.logprob, special=False, alternative_tokens=others or None)
            self._count += 1
            if text and self._count < self._most:
                yield StreamResponse(self._held)
                self._held = None
        if piece.text and not piece.token_ids:  # Late text of earlier tokens.
            held = self._held or Token(-1, "", 0.0, special=False)
            self._held = replace(held, text=held.text + piece.text)

    def _last(self, whole: Generation) -> Iterator[StreamResponse]:
        token = self._held or Token(-1, "", 0.0, special=True)
        if isinstance(whole.stop, str):
            if self._held is not None:
                yield StreamResponse(self._held)
            token = Token(-1, whole.stop, 0.0, special=False)
        elif whole.finish_reason is End.END:
            token = replace(token, special=True)
        yield StreamResponse(token, self._text(whole), StreamDetails(*self._figures(whole)))

    def whole(self, responses: list[StreamResponse]) -> Response:
        """Return the whole answer, made of the responses that would have been streamed."""
        last = responses[-1]
        assert last.generated_text is not None, "a stream ends with its text or raises"
        assert last.details is not None
        if not self._with_details:
            return Response(last.generated_text)
        tokens = tuple(response.token for response in responses if response.token.id >= 0)
        figures = last.details
        return Response(
            last.generated_text,
            Details(figures.finish_reason, figures.prompt_tokens, figures.generated_tokens, figures.seed, tokens),
        )

    def _text(self, whole: Generation) -> str:
        # LoRAX's text includes the stop string, Loraplex's ends before it.
        return self._prefix + whole.text + (whole.stop if isinstance(whole.stop, str) else "")

    def _figures(self, whole: Generation) -> tuple[FinishReason, int, int, int | None]:
        return _REASONS[whole.finish_reason], whole.usage.prompt_tokens, len(whole.token_ids), self._seed
