"""Fields in the bytes of messages: as many as the decoded message has, and the one above the maximum is named."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import ListValue
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.router.api.service import FIELDS, field_in_excess

REQUEST = pb.GenerateRequest.DESCRIPTOR
# The beginning and the end of a group, which count as two fields.
GROUP = b"\xfb\x07\xfc\x07"


def fields_of(message: Message) -> int:
    """Count the fields of a decoded message as its bytes have them: packed numbers are one."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            count += 3 * len(value)
        elif not field.is_repeated:
            count += 1 + (fields_of(value) if field.message_type is not None else 0)
        elif field.message_type is not None:
            count += sum(1 + fields_of(one) for one in value)
        else:
            count += 1 if field.is_packed else len(value)
    return count


def drawn(rng: random.Random) -> pb.GenerateRequest:
    """Return a request with some of all kinds of fields."""
    spec = pb.GenerateSpec(
        request_id="r" * rng.randrange(300),
        sampling=pb.Sampling(temperature=rng.random(), logit_bias=dict.fromkeys(range(1, rng.randrange(2, 9)), 1.0)),
        stopping=pb.Stopping(stop=["x"] * rng.randrange(5), stop_token_ids=range(rng.randrange(200))),
        adapters=[pb.WeightedAdapter(adapter="a", weight=rng.random())] * rng.randrange(3),
        priority=-1,
    )
    if rng.random() < 0.5:
        spec.token_ids.ids.extend(rng.randrange(1 << 32) for _ in range(rng.randrange(100)))
    else:
        turns = [pb.ChatMessage(role="user", parts=[pb.ContentPart(text="x")] * rng.randrange(4)) for _ in range(5)]
        spec.chat.CopyFrom(pb.Chat(messages=turns))
    return pb.GenerateRequest(spec=spec)


def test_the_count_is_that_of_the_decoded_message() -> None:
    seed = 17
    rng = random.Random(seed)
    for number in range(200):
        message = drawn(rng)
        data, count = message.SerializeToString(), fields_of(message)
        assert field_in_excess(data, REQUEST, count) == "", (seed, number)
        assert field_in_excess(data, REQUEST, count - 1) != "", (seed, number)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (pb.GenerateSpec(chat=pb.Chat(messages=[pb.ChatMessage()] * FIELDS)), "spec.chat.messages"),
        (
            pb.GenerateSpec(chat=pb.Chat(messages=[pb.ChatMessage(parts=[pb.ContentPart()] * FIELDS)])),
            "spec.chat.messages.parts",
        ),
        (pb.GenerateSpec(choices=pb.Choices(values=["x"] * FIELDS)), "spec.choices.values"),
        (pb.GenerateSpec(stopping=pb.Stopping(stop=["x"] * FIELDS)), "spec.stopping.stop"),
        (pb.GenerateSpec(token_ids=pb.TokenIds(ids=[1 << 31] * 10 * FIELDS)), ""),
        (pb.GenerateSpec(prompt="x" * 10 * FIELDS), ""),
    ],
    ids=["messages", "parts", "choices", "stops", "packed ids", "a long text"],
)
def test_the_field_above_the_maximum_is_named(spec: pb.GenerateSpec, path: str) -> None:
    assert field_in_excess(pb.GenerateRequest(spec=spec).SerializeToString(), REQUEST) == path


def within_spec(*fields: bytes) -> bytes:
    """Return the bytes of a request whose spec has these fields."""
    body = b"".join(fields)
    return b"\x0a" + bytes((len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14)) + body


@pytest.mark.parametrize(
    "field",
    [b"\xf8\x07\x01", b"\xf8\x07\xff\x01", b"\xf9\x07" + bytes(8), b"\xfa\x07\x01x", b"\xfd\x07" + bytes(4), GROUP],
    ids=["varint", "long varint", "fixed64", "bytes", "fixed32", "group"],
)
def test_fields_that_nobody_knows_count(field: bytes) -> None:
    each = 2 if field == GROUP else 1
    data = within_spec(*[field] * 1_000)
    assert field_in_excess(data, REQUEST, 1_000 * each + 1) == ""
    assert field_in_excess(data, REQUEST, 1_000 * each) == "spec"


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\xff", b"\x0a\x7f" + b"\x08" * 20, b"\xff" * 100, b"\x0a\x05x"])
def test_bytes_that_are_no_message_are_left_to_the_decoder(data: bytes) -> None:
    assert field_in_excess(data, REQUEST, 1 if len(data) < 3 else 50) == ""


@pytest.mark.parametrize("size", range(1, 6))
def test_tags_and_sizes_are_read_as_decoders_read_them(size: int) -> None:
    one = bytes((0x81, *[0x80] * (size - 2), 0)) if size > 1 else b"\x01"
    tag = bytes((0xFA, 0x87, *[0x80] * (size - 3), 0)) if size > 2 else b"\xfa\x07"  # field 127, unknown
    number = b"\xf8\x07" + b"\xff" * (size + 4) + b"\x01"  # up to ten bytes
    data = within_spec(*[tag + one + b"x" + number] * 500)
    pb.GenerateRequest.FromString(data)
    assert field_in_excess(data, REQUEST, 1_001) == ""
    assert field_in_excess(data, REQUEST, 1_000) == "spec"


@pytest.mark.parametrize("field", [b"\xfa\x87\x80\x80\x80\x00\x01x", b"\xfa\x07\x81\x80\x80\x80\x80\x00x"])
def test_decoders_refuse_what_the_count_does_not_read(field: bytes) -> None:
    data = within_spec(*[field] * 200)
    assert field_in_excess(data, REQUEST, 100) == ""
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(data)


class Looked(bytes):
    """Bytes that count how many of them are looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("before", [b"", b"\x08", b"\x0a"], ids=["tag", "value", "size"])
def test_a_number_without_an_end_is_not_read_to_the_end_of_the_message(before: bytes) -> None:
    data = Looked(before + b"\xff" * 20_000)
    assert field_in_excess(data, REQUEST) == ""
    assert data.looks < 20


def test_messages_in_messages_are_counted_as_deep_as_decoders_read() -> None:
    data = b""
    for number in range(5_000):  # a ListValue holds Values in field 1, and a Value a ListValue in field 6
        size = bytes((len(data) & 127 | 128, len(data) >> 7 & 127 | 128, len(data) >> 14))
        data = (b"\x0a" if number % 2 else b"\x32") + size + data
    assert field_in_excess(data, ListValue.DESCRIPTOR, 10) != ""
    assert field_in_excess(data, ListValue.DESCRIPTOR, 200) == ""
