"""The outputs and failures that the scheduler reports of a sequence."""

from __future__ import annotations

from artifacts.errors import ArtifactError, MismatchError
from worker.engine.scheduling.sequence import Sequence
from worker.engine_api import Failure, FailureCode, FinishKind, Output, TokenLogprobs

OUT_OF_MEMORY = Failure("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "the worker has not enough memory for it, even alone")


def output_of(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    finish: FinishKind | None,
    failure: Failure | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
) -> Output:
    """Report a sequence's new tokens, its end, or both; its first output reports its start too."""
    offset = sequence.answered - len(token_ids)
    # Every later output follows tokens of this attempt.
    first = offset == len(sequence.spec.emitted_ids)
    return Output(
        sequence.sequence_id,
        offset,
        token_ids,
        finish,
        failure,
        adapter_ms=sequence.adapter_ms if first else None,
        cached_tokens=(sequence.cached_tokens or 0) if first else None,
        logprobs=logprobs,
        # Of a sequence that fails before its first token they are incomplete.
        prompt_logprobs=tuple(sequence.prompt_logprobs) if first and failure is None else (),
        vector=sequence.vector,
    )


def adapter_failure(digest: str, error: Exception) -> Failure:
    """Make the failure of the sequences whose adapter could not be loaded."""
    code: FailureCode = "INTERNAL"
    if isinstance(error, MismatchError):
        code = "FAILED_PRECONDITION"
    elif isinstance(error, ArtifactError):
        code = "INVALID_ARGUMENT"
    return Failure(code, "ADAPTER_UNLOADABLE", f"adapter {digest}: {error}", field="adapter")
