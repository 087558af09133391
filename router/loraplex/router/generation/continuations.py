"""The ids of continuations of a prompt, of which Score and Decide ask the log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex.router.catalog.models import ServedModel
from loraplex.router.generation.admission import Admission
from loraplex.router.request import PromptOptions, Request
from loraplex.router.text.tokenizer import context_exceeded
from loraplex.runtime.rpc.errors import InvalidField

# Number of a prompt's last characters with which its continuations are tokenized.
_FRONT = 512


@dataclass(frozen=True, slots=True)
class _Front:
    """A text in front of continuations, its ids, and how it is tokenized."""

    text: str
    ids: tuple[int, ...]
    options: PromptOptions


async def continuation_ids(
    admission: Admission, request: Request, continuations: Sequence[str | tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]], str, str]:
    """Return the ids of a request's prompt, and of each continuation; the names of its model and revision.

    Raises a CallError.
    """
    model, adapter = await admission.resolve(request, await admission.side_of(request))
    context = model.manifest.context_length
    prompt_ids = await admission.prompt_ids(request)
    if not prompt_ids:
        raise InvalidField(request.prompt_field, "has no tokens")
    front = await _front(admission, request, model, prompt_ids)
    endings = [
        ending if isinstance(ending, tuple) else await _continue(admission, request, model, front, ending, index)
        for index, ending in enumerate(continuations)
    ]
    for index, ending in enumerate(endings):
        if not ending:
            raise InvalidField(f"continuations[{index}]", "has no tokens")
        if len(prompt_ids) + len(ending) > context:
            size = f"{len(prompt_ids)} prompt tokens and its {len(ending)}"
            raise context_exceeded(f"continuations[{index}]", size, context)
    return prompt_ids, endings, model.manifest.name, adapter.revision if adapter else ""


async def _front(
    admission: Admission, request: Request, model: ServedModel, prompt_ids: tuple[int, ...]
) -> _Front | None:
    """Return what continuations are tokenized with: the end of a prompt's text where its tokens are the prompt's.

    So a long prompt is not tokenized again with each of them. None where the prompt is no text.
    """
    if not isinstance(request.prompt, str):
        return None
    options = replace(request.prompt_options, truncate_to=None)
    if len(request.prompt) > 2 * _FRONT:
        end, bare = request.prompt[-_FRONT:], replace(options, add_special_tokens=False)
        ids = await _text_ids(admission, request, model, end, request.prompt_field, bare)
        # The first tokens may be cut off by the text's beginning.
        if (same := len(ids) // 2) and ids[-same:] == prompt_ids[-same:]:
            return _Front(end, ids, bare)
    return _Front(request.prompt, prompt_ids, options)


async def _continue(
    admission: Admission, request: Request, model: ServedModel, front: _Front | None, text: str, index: int
) -> tuple[int, ...]:
    """Return the ids of a continuation: those that the prompt's text gains with it, if the prompt's own stay."""
    field = f"continuations[{index}]"
    if front is not None:
        ids = await _text_ids(admission, request, model, front.text + text, field, front.options)
        if ids[: len(front.ids)] == front.ids and len(ids) > len(front.ids):
            return ids[len(front.ids) :]
    options = replace(request.prompt_options, truncate_to=None, add_special_tokens=False)
    return await _text_ids(admission, request, model, text, field, options)


async def _text_ids(
    admission: Admission, request: Request, model: ServedModel, text: str, field: str, options: PromptOptions
) -> tuple[int, ...]:
    context = model.manifest.context_length
    return await admission.prompts.tokenize(model.tokenizer, text, field, request.tenant, context, options)
