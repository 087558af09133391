"""Two experiments with answers that keep to a JSON schema, for the cluster of `make run`.

    python -m examples.structured                 127.0.0.1:50051, tenant globex

A person (a name of at most ten characters, a whole age), and the named entities of a sentence as four lists. The base
model answers with the schema, the adapter `json` with it and without; what is printed was parsed by json.loads. Without
a schema the adapter's answer is its own JSON, or none where it is cut.
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
    "person": ("Ada Lovelace was 36 years old. As JSON: ", PERSON),
    "entities": ("In 1990 Guido worked for CWI in Amsterdam. The names in it: ", ENTITIES),
}


def ask(client: Client, prompt: str, schema: dict[str, Any] | None, adapter: str | None) -> Any:
    """Return the parsed answer; without a schema None where it is no JSON."""
    schema_text = None if schema is None else json.dumps(schema)
    answer = client.generate(prompt, adapter_id=adapter, json_schema=schema_text, max_tokens=800)
    try:
        return json.loads(answer.text)
    except ValueError:
        if schema is not None:
            raise
        return None


def run(client: Client) -> dict[str, list[Any]]:
    """Return the answers of each experiment: base with the schema, adapter with it, adapter without."""
    return {
        name: [
            ask(client, prompt, schema, None),
            ask(client, prompt, schema, "json"),
            ask(client, prompt, None, "json"),
        ]
        for name, (prompt, schema) in EXPERIMENTS.items()
    }


def main() -> int:
    """Print the answers, or why there are none."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    try:
        with Client(address, "globex") as router:
            for experiment, answers in run(router).items():
                for who, parsed in zip(("base, schema", "json, schema", "json alone"), answers, strict=True):
                    print(f"{experiment:9} {who:13} {json.dumps(parsed)}")
    except LoraplexError as error:
        print(f"error: {error}; `make run` starts a cluster with the adapter", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
