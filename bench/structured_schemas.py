"""The schemas of bench.structured: four of the kind that services ask models for, and variants that nobody has seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def _object(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    """Return the schema of an object with these properties alone, of which some may be left out."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


def _text(longest: int, shortest: int = 1) -> dict[str, Any]:
    return {"type": "string", "minLength": shortest, "maxLength": longest}


def _list(items: Mapping[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": dict(items), "minItems": least, "maxItems": most}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_COUNT = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_AMOUNT = {"type": "number", "minimum": 0, "maximum": 100_000}
_ADDRESS = _object(
    {
        "name": _text(60),
        "street": _text(80),
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
        "city": _text(40),
        "country": _one_of("AT", "BE", "CH", "DE", "DK", "ES", "FR", "GB", "IT", "NL", "PL", "SE", "US"),
    }
)
_ORDER = _object(
    {
        "order_id": {"type": "string", "pattern": "^ORD-[0-9]{8}$"},
        "currency": _one_of("EUR", "USD", "GBP", "CHF"),
        "customer": _object({"customer_id": _COUNT, "email": _text(60), "vip": {"type": "boolean"}}),
        "items": _list(
            _object(
                {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "title": _text(60),
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                    "unit_price": _AMOUNT,
                    "options": _list(_object({"name": _text(20), "value": _text(30)}), 4),
                },
                "options",
            ),
            10,
            1,
        ),
        "shipping": _object({"method": _one_of("standard", "express", "pickup"), "address": _ADDRESS}),
        "discount": {"anyOf": [{"type": "null"}, _object({"code": _text(16), "amount": _AMOUNT})]},
        "total": _AMOUNT,
    }
)
_EVENT = _object(
    {
        "summary": _text(80),
        "description": _text(400),
        "location": {"anyOf": [_text(80), {"type": "null"}]},
        "start": _object({"date_time": {"type": "string", "format": "date-time"}, "time_zone": _text(32)}),
        "end": _object({"date_time": {"type": "string", "format": "date-time"}, "time_zone": _text(32)}),
        "status": _one_of("confirmed", "tentative", "cancelled"),
        "visibility": _one_of("default", "public", "private"),
        "attendees": _list(
            _object(
                {
                    "email": {"type": "string", "format": "email"},
                    "display_name": _text(40),
                    "response": _one_of("needs_action", "declined", "tentative", "accepted"),
                    "optional": {"type": "boolean"},
                },
                "display_name",
            ),
            20,
        ),
        "reminders": _list(
            _object(
                {"method": _one_of("email", "popup"), "minutes": {"type": "integer", "minimum": 0, "maximum": 40_320}}
            ),
            5,
        ),
        "recurrence": {"anyOf": [{"type": "null"}, _one_of("daily", "weekly", "monthly", "yearly")]},
    },
    "recurrence",
)
_TICKET = _object(
    {
        "title": _text(120),
        "type": _one_of("bug", "feature", "task", "question"),
        "priority": _one_of("low", "medium", "high", "urgent"),
        "component": _text(40),
        "labels": _list({"type": "string", "pattern": "^[a-z][a-z0-9-]{0,19}$"}, 6),
        "description": _text(1_000),
        "steps_to_reproduce": _list(_text(160), 10),
        "environment": _object(
            {
                "os": _one_of("linux", "macos", "windows", "ios", "android", "other"),
                "version": {"type": "string", "pattern": "^[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]{1,3}$"},
                "browser": {"anyOf": [_text(30), {"type": "null"}]},
            }
        ),
        "assignee": {"anyOf": [_text(40), {"type": "null"}]},
        "estimate_hours": {"type": "number", "minimum": 0, "maximum": 1_000},
        "duplicates": _list(_COUNT, 5),
    },
    "estimate_hours",
    "duplicates",
)
_CLASSIFICATION = _object(
    {
        "category": _one_of(
            "billing", "refund", "shipping", "login", "cancellation", "product_question", "complaint", "praise", "other"
        ),
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "sentiment": _one_of("positive", "neutral", "negative"),
        "language": {"type": "string", "pattern": "^[a-z]{2}$"},
        "entities": _list(
            _object(
                {
                    "kind": _one_of("person", "organization", "product", "order", "date", "amount", "place"),
                    "text": _text(60),
                    "begin": _COUNT,
                    "end": _COUNT,
                }
            ),
            20,
        ),
        "needs_human": {"type": "boolean"},
        "summary": _text(200),
        "reply": _text(600),
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
    }
)

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "shop order": _ORDER,
    "calendar event": _EVENT,
    "issue ticket": _TICKET,
    "support classification": _CLASSIFICATION,
}


def schema_text(number: int, variant: str = "") -> str:
    """Return one of the schemas, in turn, as JSON; a variant has a further property of this name in each object."""
    schema = list(SCHEMAS.values())[number % len(SCHEMAS)]
    return json.dumps(_varied(schema, variant) if variant else schema)


def _varied(part: Any, name: str) -> Any:
    if isinstance(part, list):
        return [_varied(inner, name) for inner in part]
    if not isinstance(part, dict):
        return part
    varied = {key: _varied(inner, name) for key, inner in part.items()}
    if varied.get("additionalProperties") is False:
        varied["properties"] = {**varied["properties"], name: {"type": "boolean"}}
        varied["required"] = [*varied["required"], name]
    return varied
