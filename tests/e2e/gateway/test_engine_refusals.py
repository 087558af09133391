"""Every field of the engine protocol that is refused, by its name."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto", reason="the engine protocol's package is not installed: pip install '.[smg]'")

from tests.e2e.gateway.engine_calls import answers, asked, refused

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (asked(tokenized=None), "INVALID_ARGUMENT", "tokenized.input_ids"),
        (asked(params={"temperature": -1}), "INVALID_ARGUMENT", "sampling_params.temperature"),
        (asked(params={"top_k": -2}), "INVALID_ARGUMENT", "sampling_params.top_k"),
        (asked(params={"n": 99}), "INVALID_ARGUMENT", "sampling_params.n"),
        (asked(params={"min_new_tokens": 99}), "INVALID_ARGUMENT", "sampling_params.min_new_tokens"),
        (asked(params={"logit_bias": {"x": 1.0}}), "INVALID_ARGUMENT", "sampling_params.logit_bias"),
        (asked(params={"stream_interval": -1}), "INVALID_ARGUMENT", "sampling_params.stream_interval"),
        (asked(params={"stop": [""]}), "INVALID_ARGUMENT", "sampling_params.stop"),
        (asked(params={"regex": "("}), "INVALID_ARGUMENT", "sampling_params.regex"),
        (asked(params={"ebnf_grammar": "root ::= ("}), "INVALID_ARGUMENT", "sampling_params.ebnf_grammar"),
        (asked(params={"ebnf_grammar": "root ::= " + "(" * 3000}), "INVALID_ARGUMENT", "sampling_params.ebnf_grammar"),
        (
            asked(params={"ebnf_grammar": "root ::= a" + " a" * 5000}),
            "INVALID_ARGUMENT",
            "sampling_params.ebnf_grammar",
        ),
        (asked(params={"json_schema": '{"not": {}}'}), "INVALID_ARGUMENT", "sampling_params.json_schema.not"),
        (asked(params={"structural_tag": "{}"}), "UNIMPLEMENTED", "sampling_params.structural_tag"),
        (asked(params={"custom_params": {"a": 1}}), "UNIMPLEMENTED", "sampling_params.custom_params"),
        (asked(10**9), "INVALID_ARGUMENT", "sampling_params.max_new_tokens"),
        (asked(logprob_start_len=3, return_logprob=True), "INVALID_ARGUMENT", "logprob_start_len"),
        (asked(top_logprobs_num=-1), "INVALID_ARGUMENT", "top_logprobs_num"),
        (asked(top_logprobs_num=21, return_logprob=True), "INVALID_ARGUMENT", "top_logprobs_num"),
        (asked(60_000, top_logprobs_num=20, return_logprob=True), "INVALID_ARGUMENT", "top_logprobs_num"),
        (asked(data_parallel_rank=1), "INVALID_ARGUMENT", "data_parallel_rank"),
        (asked(request_id="a b"), "INVALID_ARGUMENT", "request_id"),
        (asked(lora_id="nobody"), "NOT_FOUND", ""),
        (asked(mm_inputs={"image_urls": ["x"]}), "UNIMPLEMENTED", "mm_inputs"),
        (asked(input_embeds=[1.0]), "UNIMPLEMENTED", "input_embeds"),
        (asked(token_ids_logprob=[1]), "UNIMPLEMENTED", "token_ids_logprob"),
        (asked(return_hidden_states=True), "UNIMPLEMENTED", "return_hidden_states"),
        (asked(custom_logit_processor="x"), "UNIMPLEMENTED", "custom_logit_processor"),
        (asked(disaggregated_params={"bootstrap_room": 1}), "UNIMPLEMENTED", "disaggregated_params"),
        (asked(require_reasoning=True), "UNIMPLEMENTED", "require_reasoning"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_not_served_is_refused_by_its_name(stub: Any, request_: Any, code: str, field: str) -> None:
    assert await refused(answers(stub, request_)) == (grpc.StatusCode[code], field)
