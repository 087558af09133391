"""A model's own chat template, rendered as transformers does it. Jinja is sandboxed: anybody may have written it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.request import ChatMessage
from rpc.errors import InvalidField

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._tokens = dict(tokens)

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """Return the template among a model's files; None without one. Raises ValueError where it is broken."""
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        source = (
            files["chat_template.jinja"].decode() if "chat_template.jinja" in files else config.get("chat_template")
        )
        if isinstance(source, list):  # several templates, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            return None
        values = {name: config.get(name) for name in _TOKENS}
        tokens = {
            name: value["content"] if isinstance(value, dict) else value for name, value in values.items() if value
        }
        try:
            return cls(source, tokens)
        except TemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Render the prompt up to the assistant's turn. Raises InvalidField with the template's own words."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # anybody may have written the template: it may raise anything
            raise InvalidField("chat.messages", f"the model's chat template refuses them: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
