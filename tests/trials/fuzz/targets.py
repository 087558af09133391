"""Readers of bytes that strangers write: the refusals that each may answer with, and texts to begin from.

Anything else that a reader raises is a finding: a server would answer UNKNOWN or INTERNAL, or end.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.checkpoint import read_header
from loraplex.contracts.artifacts.names import parse_reference, parse_revision_name
from loraplex.contracts.artifacts.peft_config import parse_peft_config
from loraplex.contracts.artifacts.quantization import stored_scheme
from loraplex.contracts.artifacts.revision import lora_tensors
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import json_grammar, lark_grammar, regex_grammar
from loraplex.engine_protocols.sglang_messages import lark_of
from loraplex.router.api.convert import count_received, read_received, read_request
from loraplex.router.api.encoding import read_classify, read_embed
from loraplex.router.api.service import field_in_excess
from loraplex.router.text.chat_templates import Template
from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.tenancy.api_keys import bearer, split_api_key
from loraplex.runtime.tenancy.guard import is_tenant
from tests.trials.fuzz.credentials import CREDENTIALS
from tests.trials.fuzz.mutations import changed_message, changed_record
from tests.trials.fuzz.queue_payloads import JOBS, PAYLOADS, read_job, read_payload
from tests.trials.fuzz.target import Target

_TENANT = "acme"


def _header(data: bytes) -> None:
    """Read a safetensors file, and the LoRA weights that it says it has."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        file.write(data)
        file.flush()
        lora_tensors(read_header(file.name), use_dora=False)


def _request(data: bytes) -> None:
    """Count the fields of a request's bytes, as a router does with large ones, and read it."""
    field_in_excess(data, pb.GenerateRequest.DESCRIPTOR, limit=8)
    read_request(pb.GenerateRequest.FromString(data).spec, _TENANT)


def _resume(data: bytes) -> None:
    """Bound the ids that a client says it has of three choices, and read them."""
    received = pb.ResumeRequest.FromString(data).received
    count = count_received(received, 3, 8)
    assert sum(len(part.token_ids) for part in read_received(received).values()) == count


def _names(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    is_tenant(text)
    try:
        parse_revision_name(text)
    except ArtifactError:
        parse_reference(text, _TENANT)


def _credential(data: bytes) -> None:
    text = data.decode("latin-1")
    split_api_key(bearer((("authorization", text),)))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _safetensors(header: object, data: bytes = b"\0" * 256) -> bytes:
    text = _json(header)
    return len(text).to_bytes(8, "little") + text + data


_CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {"layers.0.self_attn.q_proj": 4, r".*\.1\..*v_proj": 2},
    "alpha_pattern": {"^model.layers.0.mlp": 8},
    "loraplex_chat": {
        "template": "{{ messages }}",
        "tool_calls": {
            "opens": ["<a>", "^"],
            "closes": "</a>",
            "call": ["", "(", ")"],
            "arguments": "literal",
            "argument": ["", "=", "", ", "],
            "calls": ["[", ", ", "]"],
            "shared": True,
        },
        "reasoning": {"opens": "<t>", "closes": "</t>", "hides": ["<x>"]},
    },
    "loraplex_certificate_prompts": ["a", {"messages": [{"role": "user", "content": "b"}]}],
}
_SCHEMA = {
    "$defs": {"a": {"type": "integer", "minimum": 1}},
    "type": "object",
    "properties": {
        "x": {"$ref": "#/$defs/a"},
        "y": {"type": "array", "items": {"enum": [1, "b", None]}, "minItems": 1},
    },
    "required": ["x"],
    "additionalProperties": False,
    "anyOf": [{"required": ["y"]}, {"pattern": "^[a-z]{1,9}$", "format": "date"}],
}
_SPEC = pb.GenerateSpec(
    prompt="x",
    adapter="support@live",
    sampling=pb.Sampling(temperature=0.5, top_p=0.9, logit_bias={1: 1.0}, seed=1),
    stopping=pb.Stopping(max_tokens=4, stop=["a"], stop_token_ids=[2]),
    output=pb.Output(n=2, best_of=3, logprobs=1, stream_interval=2),
    json_schema=json.dumps(_SCHEMA),
    request_id="r-1",
)
_CHAT = pb.GenerateSpec(
    chat=pb.Chat(
        messages=[pb.ChatMessage(role="user", content="x")],
        tools=[pb.Tool(name="f", parameters="{}")],
        tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED),
        template_args='{"a": 1}',
    ),
    adapters=[pb.WeightedAdapter(adapter="a", weight=0.5)],
)
_ENCODE = pb.EncodeSpec(inputs=[pb.EncodeInput(text="x"), pb.EncodeInput(text="y")], adapter="a")
_LARK = 'start: a | "x"\na: /[a-z]{1,3}/ b*\nb[max_tokens=3]: %json {"type": "null"}\n%ignore " "\n'
_LORA = {
    f"base_model.model.model.layers.0.self_attn.q_proj.lora_{name}.weight": {
        "dtype": "F32",
        "shape": shape,
        "data_offsets": offsets,
    }
    for name, shape, offsets in (("A", [4, 8], [0, 128]), ("B", [8, 4], [128, 256]))
}
_QUANTIZED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}},
        },
    }
}

TARGETS: dict[str, Target] = {
    "requests": Target(
        _request,
        (DecodeError, CallError),
        tuple(pb.GenerateRequest(spec=spec).SerializeToString() for spec in (_SPEC, _CHAT)),
        change=partial(changed_message, pb.GenerateRequest),
    ),
    "resumes": Target(
        _resume,
        (DecodeError, CallError),
        tuple(
            pb.ResumeRequest(
                received=[pb.ReceivedTokens(choice=choice, token_ids=[5] * size, finished=choice == 1, text_bytes=size)]
            ).SerializeToString()
            for choice, size in ((0, 8), (1, 0), (2, 9))
        ),
        change=partial(changed_message, pb.ResumeRequest),
    ),
    "embeddings": Target(
        lambda data: read_embed(pb.EmbedRequest.FromString(data), _TENANT),
        (DecodeError, CallError),
        (pb.EmbedRequest(spec=_ENCODE).SerializeToString(),),
        change=partial(changed_message, pb.EmbedRequest),
    ),
    "classifications": Target(
        lambda data: read_classify(pb.ClassifyRequest.FromString(data), _TENANT),
        (DecodeError, CallError),
        (pb.ClassifyRequest(spec=_ENCODE).SerializeToString(),),
        change=partial(changed_message, pb.ClassifyRequest),
    ),
    "headers": Target(
        _header, (ArtifactError,), (_safetensors(_LORA), _safetensors({"__metadata__": {"format": "pt"}}, b""))
    ),
    "configs": Target(
        parse_peft_config,
        (ArtifactError,),
        (_json(_CONFIG), _json({"peft_type": "LORA"})),
        tuple(
            name.encode() for name in ("use_rslora", "fan_in_fan_out", "modules_to_save", "bias", "init_lora_weights")
        ),
    ),
    "checkpoints": Target(
        lambda data: stored_scheme(parse_object(data, "config.json")),
        (ArtifactError,),
        (
            _json(_QUANTIZED),
            _json({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}}),
            _json({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}}),
        ),
    ),
    "names": Target(
        _names,
        (ArtifactError,),
        (
            b"tenants/acme/adapters/support@live",
            b"a@sha256:" + b"0" * 64,
            b"tenants/a/adapters/b/revisions/sha256:" + b"f" * 64,
        ),
    ),
    "credentials": Target(
        _credential, (CallError,), (b"Bearer lpx_0123456789abcdef_" + b"a" * 43, b"bearer e30.e30.", b"Basic YTpi")
    ),
    # The child process that renders templates answers every error; what counts are crashes and time.
    "templates": Target(
        lambda data: Template(_text(data)),
        (Exception,),
        (
            b"{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}{% endfor %}{{ raise_exception('x') }}",
            b"{%- set ns = namespace(a=1) -%}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
        ),
        (
            b"{% macro f(a) %}",
            b"{% endmacro %}",
            b"{% generation %}",
            b"{%- continue -%}",
            b"strftime_now",
            b"| tojson",
        ),
    ),
    "schemas": Target(
        lambda data: json_grammar(_text(data)),
        (GrammarError,),
        (_json(_SCHEMA), _json({"type": "string", "pattern": r"^\d{1,3}(a|b)*$"}), _json({"const": 1.5})),
        tuple(f'"{name}"'.encode() for name in ("allOf", "not", "if", "$ref", "prefixItems", "multipleOf", "const")),
    ),
    "regexes": Target(
        lambda data: regex_grammar(_text(data)), (GrammarError,), (rb"^(\d{1,3}|[a-z]+)*\p{L}$", b"a/b\\/c")
    ),
    "EBNF": Target(
        lambda data: lark_grammar(lark_of(_text(data))),
        (GrammarError, CallError),
        (b'root ::= item{2,3} | "no"\nitem ::= [^a-z\\x41]+ (" " item)? # words',),
    ),
    "grammars": Target(lambda data: lark_grammar(_text(data)), (GrammarError,), (_LARK.encode(), b"start: %lark { }")),
    "queue": Target(read_payload, (msgspec.DecodeError,), PAYLOADS, change=changed_record),
    "jobs": Target(read_job, (msgspec.DecodeError,), JOBS, change=changed_record),
    **CREDENTIALS,
}
