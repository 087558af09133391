"""An adapter's directory, as trainers leave it: what is uploaded of it, or why it cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from loraplex_client.errors import InvalidRequestError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Chat templates beside an adapter, as transformers saves them; they become a field of the configuration.
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "tool_use.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_FIELD = "loraplex_chat"
_TOOL_TEMPLATE_PATHS = (TOOL_TEMPLATE_FILE, f"additional_chat_templates/{TOOL_TEMPLATE_FILE}")
# Prompts beside an adapter, a JSON object a line with `prompt` or `messages`, and an `answer` or none: its certificates
# are made with them. They become a field of the configuration too.
PROMPTS_FILE = "certificate_prompts.jsonl"
PROMPTS_FIELD = "loraplex_certificate_prompts"
# Tokens that training added to the tokenizer, with all that the base's has; of slow tokenizers the second file. The
# store keeps those that are new in a field of the configuration.
TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKENS_FIELD = "loraplex_tokens"
# Tokens that end its answers: the eos_token of its tokenizer, by its text, and the ids of its generation config. The
# store keeps those that differ from the base's.
ENDS_FIELD = "loraplex_end_tokens"
_TOKEN_FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")
# The place of the tokens in a tokenizer.json, before its vocabulary, and the maximum bytes up to their end.
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_ADDED_BYTES = 2 * 1024 * 1024
# Its max_new_tokens becomes a field of the configuration: the tokens of an answer whose request sets no maximum.
GENERATION_FILE = "generation_config.json"
MAX_TOKENS_FIELD = "loraplex_max_tokens"
# Files beside the two that become fields of the configuration.
FILES_BESIDE = (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    PROMPTS_FILE,
    TOKENIZER_FILE,
    ADDED_TOKENS_FILE,
)
# The beginning of a file that git checked out without git-lfs.
_LFS_POINTER = b"version https://git-lfs."
_PICKLE = "adapter_model.bin"
_MLX = "adapters.safetensors"
# Folders of sharded states by the names' patterns, and what to do with them.
_LEFT_BY_TRAINERS = {
    "pytorch_model_fsdp*": "FSDP's shards: train with fsdp_state_dict_type FULL_STATE_DICT, or load them, and save the "
    "adapter with model.save_pretrained(DIR)",
    "global_step*": "DeepSpeed's shards: save the adapter with accelerator.unwrap_model(model).save_pretrained(DIR, "
    "state_dict=accelerator.get_state_dict(model))",
}
# Sources that the store imports from; a Path has one slash of a URI's two.
_SOURCES = ("hf", "s3", "gs", "az", "oci", "file")
_HUB = "huggingface.co/"
_URI = re.compile(r"([a-z0-9]+):/{1,2}(.+)")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def why_no_adapter(directory: Path) -> str:
    """Return why a directory cannot be uploaded as an adapter, and what to do, after its name; empty: it can."""
    if not directory.exists():
        return _why_no_directory(str(directory))
    if not (directory / CONFIG_FILE).is_file():
        return _why_no_config(directory)
    if not (directory / WEIGHTS_FILE).is_file():
        return _why_no_weights(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (directory / name).open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return f"has a pointer of git-lfs as {name}, and not the file: run `git lfs pull` there"
    return ""


def _why_no_directory(path: str) -> str:
    if uri := _URI.match(path):
        scheme, place = uri.groups()
        if scheme.startswith("http") and place.startswith(_HUB):
            scheme, place = "hf", place.removeprefix(_HUB).replace("/tree/", "@")
        if scheme in _SOURCES:
            return f"is no directory; the store fetches it: `loraplex adapters import {scheme}://{place} --name NAME`"
        return f"is no directory; download it, or let the store fetch it from one of {', '.join(_SOURCES)}"
    if _REPOSITORY.fullmatch(path):
        return f"does not exist here; from a hub: `loraplex adapters import hf://{path} --name {path.split('/')[1]}`"
    return "does not exist"


def _why_no_config(directory: Path) -> str:
    if snapshots := [*directory.glob(f"snapshots/*/{CONFIG_FILE}")]:
        newest = max(snapshots, key=lambda path: path.stat().st_mtime).parent
        kind = "the root of a hub's cache"
        return f"is not an adapter, but {kind}: give one of the {len(snapshots)} below it, such as {newest}"
    if files := [*directory.glob("*.gguf")]:
        return f"has a GGUF file: `loraplex adapters push {files[0]} --model-dir BASE` converts and uploads it"
    below = sorted((path.parent for path in directory.glob(f"*/{CONFIG_FILE}")), key=_checkpoint_number)
    if below:
        kind = "the parent of checkpoints" if _checkpoint_number(below[-1])[0] >= 0 else "the parent of adapters"
        return f"is not an adapter, but {kind}: give one of the {len(below)} below it, such as {below[-1]}"
    if (directory / "config.json").is_file():
        return "is not an adapter, but a whole model: `loraplex models push` registers one"
    if not directory.is_dir():
        return f"is a file: give the directory that has {CONFIG_FILE} and {WEIGHTS_FILE}"
    return f"is not an adapter: it has no {CONFIG_FILE}"


def _checkpoint_number(directory: Path) -> tuple[int, str]:
    """Return the step of a trainer's checkpoint, -1 for another directory, and the name."""
    step = directory.name.removeprefix("checkpoint-")
    return (int(step) if step.isdecimal() else -1), directory.name


def _why_no_weights(directory: Path) -> str:
    if (directory / _MLX).is_file():
        return f"has its weights in {_MLX}, as MLX does: `loraplex adapters push {directory}` converts and uploads it"
    if (directory / _PICKLE).is_file():
        return (
            f"has its weights in {_PICKLE}, a pickle, which may run code when it is read; save them as "
            f"{WEIGHTS_FILE}: model.save_pretrained(DIR), or safetensors.torch.save_file(torch.load('{_PICKLE}', "
            f"weights_only=True), '{WEIGHTS_FILE}')"
        )
    if shards := [*directory.glob("adapter_model-*-of-*.safetensors")]:
        return (
            f"has its weights in {len(shards)} files; join them as {WEIGHTS_FILE}: load each with "
            "safetensors.torch.load_file, and save all tensors with save_file"
        )
    for pattern, what in _LEFT_BY_TRAINERS.items():
        if found := [*directory.glob(pattern)]:
            return f"has no {WEIGHTS_FILE}, but {found[0].name}, {what}"
    return f"is not an adapter: it has no {WEIGHTS_FILE}"


def read_config(directory: Path, *, tokens: bool = True) -> bytes:
    """Return an adapter's configuration as it is uploaded, with what the files in `directory` say.

    These are templates, prompts, added tokens, end tokens and the maximum of new tokens.

    What the configuration has already stays. Without `tokens` it is that of an adapter whose tokens are the base's.
    Raises InvalidRequestError if there is no adapter, or a file beside it is broken.
    """
    if why := why_no_adapter(directory):
        raise InvalidRequestError(f"{directory} {why}", field="directory")
    config = (directory / CONFIG_FILE).read_bytes()
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(fields, dict):
        return config
    more: dict[str, Any] = {}
    chat = fields.get(CHAT_FIELD, {})
    if isinstance(chat, dict) and "template" not in chat and (templates := _templates(directory)):
        more[CHAT_FIELD] = {**chat, **templates}
    if tokens and TOKENS_FIELD not in fields and (added := _added_tokens(directory)):
        more[TOKENS_FIELD] = added
    if tokens and ENDS_FIELD not in fields and (ends := _end_tokens(directory)):
        more[ENDS_FIELD] = ends
    if MAX_TOKENS_FIELD not in fields and (most := _json_object(directory / GENERATION_FILE).get("max_new_tokens")):
        more[MAX_TOKENS_FIELD] = most
    if PROMPTS_FIELD not in fields and (directory / PROMPTS_FILE).is_file():
        more[PROMPTS_FIELD] = read_prompts(directory / PROMPTS_FILE)
    return json.dumps({**fields, **more}).encode() if more else config


def template_file(directory: Path) -> str:
    """Return the name of the file beside an adapter that has its chat template; empty: none has."""
    if not _templates(directory):
        return ""
    beside = (name for name in (TEMPLATE_FILE, *_TOOL_TEMPLATE_PATHS) if (directory / name).is_file())
    return next(beside, TOKENIZER_CONFIG_FILE)


def _templates(directory: Path) -> dict[str, str]:
    """Return an adapter's chat template, and the one for chats with tools, as transformers finds them."""
    sources = _json_object(directory / TOKENIZER_CONFIG_FILE).get("chat_template")
    if (directory / TEMPLATE_FILE).is_file():
        sources = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    named: dict[Any, Any] = {"default": sources}
    if isinstance(sources, list):  # several templates, by name
        named = {one.get("name"): one.get("template") for one in sources if isinstance(one, dict)}
    if path := next((path for path in map(directory.joinpath, _TOOL_TEMPLATE_PATHS) if path.is_file()), None):
        named["tool_use"] = path.read_text(encoding="utf-8")
    found = {field: named.get(name) for name, field in (("default", "template"), ("tool_use", "tool_template"))}
    return {field: text for field, text in found.items() if isinstance(text, str) and text}


def _added_tokens(directory: Path) -> list[dict[str, Any]]:
    """Return the added tokens of an adapter's tokenizer, those of the base's too; flags that are false are left out.

    Raises InvalidRequestError.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        added = _json_object(directory / ADDED_TOKENS_FILE)
        return [{"id": number, "content": text, "normalized": True} for text, number in added.items()]
    with path.open("rb") as file:
        beginning = file.read(_ADDED_BYTES).decode("utf-8", "replace")
    found = _ADDED_TOKENS.search(beginning)
    if found is None:
        return []
    try:
        tokens, _ = json.JSONDecoder().raw_decode(beginning, found.end())
        return [
            {"id": token["id"], "content": token["content"], **{flag: True for flag in _TOKEN_FLAGS if token.get(flag)}}
            for token in tokens
        ]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(
            f"{path}: added_tokens cannot be read: {type(error).__name__}", field="directory"
        ) from error


def _end_tokens(directory: Path) -> list[str | int]:
    """Return the tokens that end an adapter's answers, those of the base too."""
    eos = _json_object(directory / TOKENIZER_CONFIG_FILE).get("eos_token")
    ids = _json_object(directory / GENERATION_FILE).get("eos_token_id")
    named = [eos.get("content") if isinstance(eos, dict) else eos, *(ids if isinstance(ids, list) else [ids])]
    return [one for one in named if (isinstance(one, str) and one) or (type(one) is int and one >= 0)]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_prompts(path: Path) -> list[str | dict[str, Any]]:
    """Return the prompts of a file: a text, or an object with `prompt` or `messages`, and `answer` where it has one.

    Raises InvalidRequestError that names a line that is none.
    """
    return [_prompt(path, number, line) for number, line in enumerate(path.read_bytes().splitlines(), start=1)]


def _prompt(path: Path, number: int, line: bytes) -> str | dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or (fields.get("prompt") is None) == (fields.get("messages") is None):
        shown = '{"prompt": "Dear customer,"} or {"messages": [...], "answer": "yes"}'
        raise InvalidRequestError(f"{path}: line {number} is not a JSON object such as {shown}", field="directory")
    # Other keys are a data set's own.
    prompt = {name: fields[name] for name in ("prompt", "messages", "answer") if fields.get(name) is not None}
    return prompt["prompt"] if prompt.keys() == {"prompt"} else prompt
