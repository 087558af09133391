"""Each directory of docs/reference/adapter-files.md is pushed: it answers as peft does, or is refused
with what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.models import registered
from loraplex.cli.terminal import CommandError
from loraplex.contracts.artifacts.activation import last_occurrence, read_invocation
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence
from loraplex_client import LoraplexError, StoreClient
from tests.clients.directory_messages import ERRORS, SAYS
from tests.clients.trained_directories import REFUSED, SERVED, TIED, load
from tests.worker.engine.peft_oracle import MARGIN, PeftOracle

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "adapter-files.md"
PROMPT = (3, 7, 1, 12, 5)
TOKENS = 8


def test_the_page_has_every_directory() -> None:
    # Ignore line breaks and capital letters: the page wraps its lines, and items begin with a capital.
    served, refused = (" ".join(part.lower().split()) for part in PAGE.read_text().split("\n## ")[3:])
    assert [name for name in SERVED if name.lower() not in served] == []
    assert [name for name in REFUSED if name.lower() not in refused] == []
    assert set(SAYS) <= set(SERVED)
    assert list(ERRORS) == list(REFUSED)
    assert len(SERVED) + len(REFUSED) >= 35


class Base:
    """A tiny model in a directory, registered at a store, and an engine with it."""

    def __init__(self, directory: Path, store: str, *, tied: bool) -> None:
        from loraplex.worker.engine.torch_engine import build_engine

        self.name, self._store = "tied" if tied else "tiny", store
        self.directory = PeftOracle(
            "llama", directory, {"any": {"r": 1, "target_modules": ["q_proj"]}}, shape={"tie_word_embeddings": tied}
        ).directory
        tokenizer = Tokenizer(models.WordLevel({f"w{at}": at for at in range(18)}, unk_token="w0"))
        tokenizer.save(str(self.directory / "tokenizer.json"))
        manifest = read_base_model(str(self.directory), self.name)
        with StoreClient(store, "acme") as client:
            client.register_model(registered(manifest), manifest.files)
        config = EngineConfig(
            str(self.directory), dtype="float32", rows=2, kv_blocks=60, block_size=4, adapter_slots=2, max_rank=32
        )
        self.engine = build_engine(config, ahead=False, paced=False)
        # The base model's own answer.
        self.plain = self.pefts_answer(None)

    def push(self, directory: Path, name: str) -> str:
        """Push a directory by the command; return what it prints. Raises CommandError."""
        flags = ["--name", name, "--model", self.name, "--model-dir", str(self.directory), "--tenant", "acme"]
        done = CliRunner().invoke(app, ["adapters", "push", str(directory), *flags, "--store", self._store])
        if done.exception is not None:
            raise done.exception
        return done.output

    def answer(self, name: str, directory: Path) -> tuple[int, ...]:
        """Return the greedy ids with a stored adapter, as a worker has its files."""
        with StoreClient(self._store, "acme") as client:
            client.download(name, directory)
        config = (directory / "adapter_config.json").read_bytes()
        source = AdapterSource(f"digest of {name}", str(directory), invocation=read_invocation(config))
        stopping = StoppingParams(TOKENS, end_ids=json.loads(config).get("loraplex_end_tokens", ()))
        at = last_occurrence(source.invocation, PROMPT) if source.invocation else 0
        assert at is not None
        self.engine.add_sequence(NewSequence("0", PROMPT, adapter=source, stopping=stopping, invoked_at=at))
        outputs: list[Any] = []
        while not outputs or outputs[-1].finish is None:
            outputs += self.engine.step()
        assert outputs[-1].failure is None, outputs[-1].failure
        return tuple(token for output in outputs for token in output.token_ids)

    @torch.inference_mode()
    def pefts_answer(self, reference: Path | None) -> tuple[int, ...]:
        """Return the greedy ids of peft with an adapter, or without one."""
        from peft import PeftModel
        from transformers import GenerationConfig

        model = load(self.directory)
        peft = model if reference is None else PeftModel.from_pretrained(model, str(reference))
        ids = list(PROMPT)
        for _ in range(TOKENS):
            logits = peft.eval()(input_ids=torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > MARGIN, "peft's best two logits are too close"
            ids.append(int(best.indices[0]))
        if reference is not None and (reference / "generation_config.json").is_file():
            config = GenerationConfig.from_pretrained(reference, max_new_tokens=TOKENS)
            ended = peft.generate(input_ids=torch.tensor([PROMPT]), generation_config=config)[0].tolist()
            assert ended == ids[: len(ended)]
            return tuple(ended[len(PROMPT) :])
        return tuple(ids[len(PROMPT) :])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, store_address: str) -> Iterator[Callable[[bool], Base]]:
    """Call with whether embeddings and head are tied: a base, made once."""
    made: dict[bool, Base] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def base(tied: bool) -> Base:
        if tied not in made:
            made[tied] = Base(tmp_path_factory.mktemp("base"), store_address, tied=tied)
        return made[tied]

    yield base
    for one in made.values():
        one.engine.close()
    torch.set_num_threads(threads)


def says(error: Exception, directory: Path) -> str:
    return str(error).replace(str(directory), "DIR")


# tests/worker/engine/gguf reads adapters of every kind.
@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=pytest.mark.nightly) if title == "GGUF" else title for title in SERVED]
)
def test_the_answer_is_pefts(title: str, bases: Callable[[bool], Base], tmp_path: Path) -> None:
    directory, base = tmp_path / "adapter", bases(title in TIED)
    directory.mkdir()
    reference, said = SERVED[title](base.directory, directory), SAYS.get(title, "")
    assert reference is not None
    name = f"a{list(SERVED).index(title)}"
    printed = base.push(directory, name).splitlines()
    told = [line for line in printed if not line.startswith(("pushed ", "live ", "base_model_name_or_path"))]
    assert " ".join(told) == said, printed
    expected = base.pefts_answer(reference)
    assert base.answer(name, tmp_path / "downloaded") == expected
    config = json.loads((tmp_path / "downloaded" / "adapter_config.json").read_text())
    assert ("loraplex_chat" in config) == ("its template" in said)
    assert ("loraplex_tokens" in config) == ("added tokens" in said)
    assert ("loraplex_end_tokens" in config) == ("also end with" in said) == (len(expected) < TOKENS)
    assert (expected == base.plain) == ("change nothing" in said)


@pytest.mark.parametrize("title", REFUSED)
def test_the_refusal_says_what_to_do(title: str, bases: Callable[[bool], Base], tmp_path: Path) -> None:
    directory, base = tmp_path / "adapter", bases(title in TIED)
    directory.mkdir()
    REFUSED[title](base.directory, directory)
    with pytest.raises((CommandError, LoraplexError)) as caught:
        base.push(directory, "refused")
    assert str(caught.value).replace(str(directory), "DIR") == ERRORS[title]
