"""LoRAX's names of errors, for programs that catch them; each names the class of `loraplex_client.errors` raised."""

from loraplex_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LoraplexError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

BadRequestError = InvalidRequestError
ValidationError = InvalidRequestError
GenerationError = LoraplexError
IncompleteGenerationError = LoraplexError
UnknownError = LoraplexError
OverloadedError = ResourceExhaustedError
RateLimitExceededError = ResourceExhaustedError
ShardNotReadyError = UnavailableError
ShardTimeoutError = DeadlineExceededError

__all__ = [
    "BadRequestError",
    "GenerationError",
    "IncompleteGenerationError",
    "NotFoundError",
    "OverloadedError",
    "RateLimitExceededError",
    "ShardNotReadyError",
    "ShardTimeoutError",
    "UnknownError",
    "ValidationError",
]
