"""A drop-in for LoRAX's Python client: change the import and the address, and programs run.

    from loraplex_client.lorax import Client          # was: from lorax import Client

    client = Client("http://127.0.0.1:50051", headers={"x-loraplex-tenant": "acme"})
    print(client.generate("Dear customer,", adapter_id="support", max_new_tokens=64).generated_text)
    for response in client.generate_stream("Dear customer,", adapter_id="support"):
        if not response.token.special:
            print(response.token.text, end="")

The tenant is the header's, or `default` without one; other headers and cookies are ignored. `adapter_id` is a name in
the adapter store, whatever `adapter_source` says. A `response_format` constrains the answer, and `merged_adapters` add
up, which is the strategy `linear`. Parameters that are not served (`watermark`, `truncate`, `decoder_input_details`,
other strategies) are refused by name.
"""

from loraplex_client.lorax.clients import AsyncClient, Client
from loraplex_client.lorax.types import (
    Details,
    FinishReason,
    MergedAdapters,
    MergeStrategy,
    Response,
    ResponseFormat,
    ResponseFormatType,
    StreamDetails,
    StreamResponse,
    Token,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Details",
    "FinishReason",
    "MergeStrategy",
    "MergedAdapters",
    "Response",
    "ResponseFormat",
    "ResponseFormatType",
    "StreamDetails",
    "StreamResponse",
    "Token",
]
