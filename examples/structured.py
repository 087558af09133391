"""Two experiments with answers that keep to a JSON schema, for the cluster of `make run`.

    python -m examples.structured                 127.0.0.1:50051, tenant acme

A person (a name of at most ten characters, a whole age), and the named entities of a sentence as four lists. The base
model answers with the schema, the adapter `extract` with it and without; what is printed was parsed by json.loads. The
adapter was trained for persons, and answers with one where nothing else is asked for.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from loraplex_client import Client, LoraplexError

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_NAMES = {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2}
ENTITIES: dict[str, Any] = {
    "type": "object",
    "properties": dict.fromkeys(("people", "organizations", "places", "dates"), _NAMES),
    "required": ["people", "organizations", "places", "dates"],
    "additionalProperties": False,
}
EXPERIMENTS = {
    "person": ("Extract the person as JSON with name and age: Ada Byron, 36, from London.", PERSON),
    "entities": ("Extract the names as JSON: In 1990 Guido worked for CWI in Amsterdam.", ENTITIES),
}


def ask(client: Client, prompt: str, schema: dict[str, Any] | None, adapter: str | None) -> Any:
    """Return the parsed answer; without a schema None where it is no JSON."""
    schema_text = None if schema is None else json.dumps(schema)
    messages = [{"role": "user", "content": prompt}]
    answer = client.chat(messages, adapter_id=adapter, json_schema=schema_text, max_tokens=800, temperature=0.0)
    try:
        return json.loads(answer.text)
    except ValueError:
        if schema is not None:
            raise
        return None


def run(client: Client, adapter: str) -> dict[str, list[Any]]:
    """Return the answers of each experiment: base with the schema, adapter with it, adapter without."""
    return {
        name: [
            ask(client, prompt, schema, None),
            ask(client, prompt, schema, adapter),
            ask(client, prompt, None, adapter),
        ]
        for name, (prompt, schema) in EXPERIMENTS.items()
    }


def main() -> int:
    """Print the answers, or why there are none."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    try:
        with Client(address, "acme") as router:
            for experiment, answers in run(router, "extract").items():
                for who, parsed in zip(("base, schema", "adapter, schema", "adapter alone"), answers, strict=True):
                    print(f"{experiment:9} {who:15} {json.dumps(parsed)}")
    except LoraplexError as error:
        print(f"error: {error}; `make run` starts a cluster with the adapter", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
