"""Refuses at admission what could not be sent: the parts of an answer that come in one message, whatever their size.

These are the prompt's log probabilities, and the best of several candidates. Other answers come in as many messages as
they need.
"""

from __future__ import annotations

from router.request import Request
from rpc.errors import InvalidField
from rpc.server import MESSAGE_BYTES

# Maximum bytes of a message's other fields: the resume token, the numbers of choice and offset.
_REST_BYTES = 64 * 1024
# Maximum bytes of a token's id, of its own log probability and of an alternative, in a message.
_ID_BYTES = 5
_LOGPROB_BYTES = 9
_ALTERNATIVE_BYTES = 13
# Maximum bytes of a token's text, on average over a whole answer.
_TEXT_BYTES = 128


def check_answer_size(request: Request, prompt: int, max_tokens: int) -> None:
    """Raise InvalidField where a part of the answer does not fit one message; `prompt` is the number of its tokens."""
    if request.prompt_logprobs is not None:
        _check("output.prompt_logprobs", request.prompt_logprobs, prompt - request.prompt_logprobs_start, 0)
    if request.best_of > request.n:
        if request.logprobs is None:
            _check_tokens(max_tokens, _ID_BYTES + _TEXT_BYTES)
        else:
            _check("output.logprobs", request.logprobs, max_tokens, _ID_BYTES + _TEXT_BYTES)


def _check(field: str, alternatives: int, tokens: int, others: int) -> None:
    """Check the log probabilities of so many tokens, of `others` bytes each without them."""
    most = _alternatives(tokens, others)
    if alternatives <= most:
        return
    if most < 0:
        raise InvalidField(field, f"those of {tokens} tokens do not fit a message; leave it out", reason=_TOO_LARGE)
    raise InvalidField(
        field, f"{alternatives} for each of {tokens} tokens do not fit a message; at most {most} do", reason=_TOO_LARGE
    )


def _alternatives(tokens: int, others: int) -> int:
    """Return how many alternatives of each token fit; below 0: not even the token's own log probability."""
    return ((MESSAGE_BYTES - _REST_BYTES) // max(1, tokens) - _LOGPROB_BYTES - others) // _ALTERNATIVE_BYTES


def _check_tokens(max_tokens: int, token_bytes: int) -> None:
    most = (MESSAGE_BYTES - _REST_BYTES) // token_bytes
    if max_tokens > most:
        message = f"{max_tokens} tokens of the best candidate do not fit a message; at most {most} do"
        raise InvalidField("stopping.max_tokens", message, reason=_TOO_LARGE)


_TOO_LARGE = "ANSWER_TOO_LARGE"
