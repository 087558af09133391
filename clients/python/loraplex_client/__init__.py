"""Python client of Loraplex: generate with a tenant's LoRA adapter, streamed or whole, blocking or on asyncio.

    with Client("127.0.0.1:50051", tenant="acme") as client:
        print(client.generate("Dear customer,", adapter_id="support", max_tokens=64).text)
        for piece in client.generate_stream("Dear customer,", adapter_id="support"):
            print(piece.text, end="", flush=True)  # break leaves, and cancels the work
        print(client.chat([{"role": "user", "content": "Hello!"}]).text)

AsyncClient has the same methods for `await` and `async for`. StoreClient and AsyncStoreClient push and list adapters.
Every error is a LoraplexError; `loraplex_client.errors` shows the tree of its classes.
"""

from importlib.metadata import version

from loraplex_client.batches import AsyncBatchClient, Batch, BatchClient, BatchError, BatchFile
from loraplex_client.chat import ToolCall, ToolCallPart
from loraplex_client.client import AsyncClient, AsyncStoreClient, Client, StoreClient
from loraplex_client.connection import AsyncGenerationStream, GenerationStream
from loraplex_client.decisions import Decision, Decisions, Question
from loraplex_client.encoding import Classification, Classifications, Embeddings, EncodeOptions
from loraplex_client.endpoint import Tls
from loraplex_client.errors import (
    AbortedError,
    AlreadyExistsError,
    AnswerFormatError,
    CancelledError,
    ClientClosedError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    LoraplexError,
    NotFoundError,
    NotImplementedByServerError,
    PermissionDeniedError,
    RateLimit,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from loraplex_client.generation import (
    Choice,
    ContinuationScore,
    FinishReason,
    Generation,
    Piece,
    Scores,
    ServedModel,
    SpeculativeDecoding,
    Timings,
    TokenLogprobs,
    Usage,
)
from loraplex_client.options import ChatOptions, GenerateOptions
from loraplex_client.reranking import DocumentScore, Ranking, RerankOptions
from loraplex_client.resources import (
    Adapter,
    BaseModel,
    Calibration,
    Exported,
    FitnessCertificate,
    GenerationConfig,
    ModelFile,
    Module,
    Provenance,
    Pushed,
    Revision,
    SourceFile,
)

__version__ = version("loraplex-client")

__all__ = [
    "AbortedError",
    "Adapter",
    "AlreadyExistsError",
    "AnswerFormatError",
    "AsyncBatchClient",
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncStoreClient",
    "BaseModel",
    "Batch",
    "BatchClient",
    "BatchError",
    "BatchFile",
    "Calibration",
    "CancelledError",
    "ChatOptions",
    "Choice",
    "Classification",
    "Classifications",
    "Client",
    "ClientClosedError",
    "ContinuationScore",
    "DataLossError",
    "DeadlineExceededError",
    "Decision",
    "Decisions",
    "DocumentScore",
    "Embeddings",
    "EncodeOptions",
    "Exported",
    "FailedPreconditionError",
    "FinishReason",
    "FitnessCertificate",
    "GenerateOptions",
    "Generation",
    "GenerationConfig",
    "GenerationStream",
    "InternalError",
    "InvalidRequestError",
    "LoraplexError",
    "ModelFile",
    "Module",
    "NotFoundError",
    "NotImplementedByServerError",
    "PermissionDeniedError",
    "Piece",
    "Provenance",
    "Pushed",
    "Question",
    "Ranking",
    "RateLimit",
    "RerankOptions",
    "ResourceExhaustedError",
    "Revision",
    "Scores",
    "ServedModel",
    "SourceFile",
    "SpeculativeDecoding",
    "StoreClient",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallPart",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
