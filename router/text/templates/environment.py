"""The Jinja environment of chat templates, as transformers' apply_chat_template makes it, and compiled templates.

The source is transformers.utils.chat_template_utils. Templates are anybody's: this runs in the child process alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.utils import Namespace

Json = dict[str, Any]


class RefusedError(Exception):
    """A request that can't be rendered; the message says why, `field` is the field of the chat that is to blame."""

    def __init__(self, message: str, field: str = "chat.messages") -> None:
        super().__init__(message)
        self.field = field


class _Generation(jinja2.ext.Extension):
    """Render what is between `{% generation %}` and `{% endgeneration %}`, which matters for training alone."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an attribute of instances

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """See jinja2.ext.Extension."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """Make dictionaries, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> Json:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> Json:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the attribute {name!r} of a namespace begins with an underscore")


def _raise(message: Any) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Template:
    """A compiled template, and what it knows: contents that are lists of parts, tools, roles."""

    def __init__(self, source: str) -> None:
        self._now = 0.0
        self._source = source
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(self._now).strftime(form)
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        tree = environment.parse(source)
        self.takes_parts = any(map(_is_content, (loop.iter for loop in tree.find_all(jinja2.nodes.For))))
        self.renders_tools = re.search(r"\btools\b", source) is not None
        self._template = environment.from_string(source)

    def knows_role(self, role: str) -> bool:
        """Return whether the source has the role as a literal."""
        return f'"{role}"' in self._source or f"'{role}'" in self._source

    def render(self, variables: Mapping[str, Any], now: float, limit: int) -> str:
        """Return the text, of at most `limit` characters. Raises RefusedError and whatever the template raises."""
        self._now = now
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise RefusedError(
                    f"the chat template makes more than the {limit} characters that the context can hold"
                )
        return "".join(pieces)


def _is_content(iterated: jinja2.nodes.Node) -> bool:
    """Return whether a loop is over `message.content`, `message['content']` or `content`."""
    while isinstance(iterated, jinja2.nodes.Filter) and iterated.node is not None:
        iterated = iterated.node
    if isinstance(iterated, jinja2.nodes.Getitem):
        return isinstance(iterated.arg, jinja2.nodes.Const) and iterated.arg.value == "content"
    if isinstance(iterated, jinja2.nodes.Getattr):
        return iterated.attr == "content"
    return isinstance(iterated, jinja2.nodes.Name) and iterated.name == "content"
