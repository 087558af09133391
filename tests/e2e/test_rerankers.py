"""Rerankers with weights: a decoder like Qwen3-Reranker and a cross-encoder, with adapters, beside transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from loraplex_client import FailedPreconditionError, InvalidRequestError, Ranking
from tests.e2e.conftest import Cluster, running_cluster

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
FLAGS = ("--dtype", "float32", "--threads", "1", "--rows", "8")
QUERY = "where is the capital of France"
DOCUMENTS = [f"{number} ways lead to Paris" for number in range(100)]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker's prompt, as its model card has it, and its template in the words of sentence-transformers and vLLM.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
ROLES = (
    PREFIX
    + "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first"
    + f" | default('{INSTRUCTION}') }}}}\n"
    + "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    + "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    + SUFFIX
    + "\n"  # Jinja drops a template's last newline
)


def save_tokenizer(directory: Path) -> Any:
    """Save a tokenizer of bytes, in which yes, no and Qwen's marks are tokens; returns it as transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast_tokenizer: Any = PreTrainedTokenizerFast
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: at for at, token in enumerate([*letters, "ye", "yes", "no"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    fast = fast_tokenizer(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(directory)
    return fast


class Decoder:
    """A tiny Qwen3 with peft's adapters in float64, and its tokenizer."""

    def __init__(self, directory: Path, save_adapter: Callable[..., None]) -> None:
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

        self.directory = directory / "model"
        self.tokenizer = save_tokenizer(self.directory)
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=len(self.tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=1024,
            tie_word_embeddings=True, pad_token_id=self.tokenizer.pad_token_id, num_labels=1,
            eos_token_id=self.tokenizer.eos_token_id,
        )  # fmt: skip
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model.save_pretrained(self.directory)
        (self.directory / "modules.json").write_text(
            json.dumps([{"type": f"sentence_transformers.{name}"} for name in ("Transformer", "LogitScore")])
        )
        (self.directory / "1_LogitScore").mkdir()
        yes, no = map(self.tokenizer.convert_tokens_to_ids, ("yes", "no"))
        (self.directory / "1_LogitScore" / "config.json").write_text(
            json.dumps({"true_token_id": yes, "false_token_id": no})
        )
        self.yes, self.no = yes, no
        self.adapters = {name: directory / name for name in ("tuned", "templated", "headed", "rendered")}
        for seed, name in enumerate(("tuned", "templated")):
            save_adapter(model, self.adapters[name], seed, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        (self.adapters["templated"] / "chat_template.jinja").write_text(ROLES)
        classes: Any = AutoModelForSequenceClassification
        self.classifier = classes.from_pretrained(self.directory, dtype=torch.float32).eval()
        self.classifier = get_peft_model(
            self.classifier, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["v_proj"], modules_to_save=["score"])
        )
        for name, parameter in self.classifier.named_parameters():
            if "lora_" in name or "score" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        for name in ("headed", "rendered"):
            self.classifier.save_pretrained(str(self.adapters[name]))
        (self.adapters["rendered"] / "chat_template.jinja").write_text(ROLES)
        self.classifier = self.classifier.eval().double()
        self.peft: Any = PeftModel.from_pretrained(model, self.adapters["tuned"], adapter_name="tuned")
        self.peft.load_adapter(self.adapters["templated"], adapter_name="templated")
        self.peft = self.peft.eval().double()

    def prompt(self, query: str, document: str, instruction: str = INSTRUCTION) -> str:
        return f"{PREFIX}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{SUFFIX}"

    def probability(self, prompt: str, adapter: str | None = None) -> float:
        """The softmax over yes and no of transformers' logits at the prompt's end: that of yes."""
        import torch

        if adapter is not None:
            self.peft.set_adapter(adapter)
        with self.peft.disable_adapter() if adapter is None else nullcontext(), torch.inference_mode():
            logits = self.peft(input_ids=torch.tensor([self.tokenizer(prompt).input_ids])).logits[0, -1]
        return float(logits[[self.yes, self.no]].softmax(-1)[0])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, save_adapter: Callable[..., None]) -> Decoder:
    return Decoder(tmp_path_factory.mktemp("decoder"), save_adapter)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, decoder: Decoder) -> AsyncIterator[Cluster]:
    """A worker with the decoder in float32 and its adapters."""
    directory = tmp_path_factory.mktemp("rerank") / "cluster"
    flags = (*FLAGS, "--kv-blocks", "512")
    async with running_cluster(directory, str(decoder.directory), decoder.adapters, worker_flags=flags) as running:
        yield running


def by_index(ranking: Ranking) -> list[float]:
    return [one.score for one in sorted(ranking.results, key=lambda one: one.index)]


async def test_a_decoder_gives_transformers_probabilities_and_computes_the_query_once(
    cluster: Cluster, eventually: Eventually, decoder: Decoder
) -> None:
    ranking = await cluster.client.rerank(QUERY, DOCUMENTS)
    truth = [decoder.probability(decoder.prompt(QUERY, document)) for document in DOCUMENTS]
    assert by_index(ranking) == pytest.approx(truth, rel=0, abs=1e-5)
    assert max(truth) - min(truth) > 1e-2, "the documents matter"
    assert [one.score for one in ranking.results] == sorted(by_index(ranking), reverse=True)
    ids = [decoder.tokenizer(decoder.prompt(QUERY, document)).input_ids for document in DOCUMENTS]
    assert ranking.usage.prompt_tokens == sum(map(len, ids))
    shared = len(decoder.tokenizer(decoder.prompt(QUERY, "").removesuffix(SUFFIX)).input_ids)
    # All whole blocks of 16 tokens that the query fills, for each document but the first.
    assert ranking.usage.cached_tokens >= 99 * (shared // 16 * 16)
    alone = await cluster.client.rerank(QUERY, DOCUMENTS[41:42])
    assert alone.results[0].logit == next(one.logit for one in ranking.results if one.index == 41)
    await eventually(cluster.idle)


async def test_adapters_change_scores_as_peft_s_and_bring_their_template(cluster: Cluster, decoder: Decoder) -> None:
    documents = DOCUMENTS[:5]
    tuned = by_index(await cluster.client.rerank(QUERY, documents, adapter_id="tuned"))
    own = [decoder.probability(decoder.prompt(QUERY, document), "tuned") for document in documents]
    assert tuned == pytest.approx(own, rel=0, abs=1e-5)
    for instruction in ("", "Find a city."):
        templated = by_index(
            await cluster.client.rerank(QUERY, documents, adapter_id="templated", instruction=instruction)
        )
        prompts = [decoder.prompt(QUERY, document, instruction or INSTRUCTION) for document in documents]
        own = [decoder.probability(prompt, "templated") for prompt in prompts]
        assert templated == pytest.approx(own, rel=0, abs=1e-5)
    plain = by_index(await cluster.client.rerank(QUERY, documents))
    assert len({round(scores[0], 4) for scores in (plain, tuned, templated)}) == 3
    swapped = by_index(await cluster.client.rerank(QUERY, documents, yes="no", no="yes"))
    assert swapped == pytest.approx([1 - score for score in plain], rel=0, abs=1e-5)
    # A special token in a document is text: the template's alone are tokens.
    forged = await cluster.client.rerank(QUERY, ["<|im_end|>", "x"], truncate=True)
    assert forged.usage.prompt_tokens > 2 * len(decoder.tokenizer(decoder.prompt(QUERY, "x")).input_ids) + 8


async def test_scores_have_the_same_bits_among_those_of_other_adapters(cluster: Cluster) -> None:
    names = (None, "tuned", "templated")
    together = await asyncio.gather(*(cluster.client.rerank(QUERY, DOCUMENTS[:20], adapter_id=name) for name in names))
    for name, ranking in zip(names, together, strict=True):
        for one in ranking.results[::5]:
            alone = await cluster.client.rerank(QUERY, [DOCUMENTS[one.index]], adapter_id=name)
            assert alone.results[0].logit == one.logit


async def test_a_decoder_s_adapter_scores_pairs_by_its_head(cluster: Cluster, decoder: Decoder) -> None:
    import torch

    documents = DOCUMENTS[:5]
    pairs = [decoder.tokenizer(QUERY, document).input_ids for document in documents]
    prompts = [decoder.tokenizer(decoder.prompt(QUERY, document)).input_ids for document in documents]
    for name, texts in (("headed", pairs), ("rendered", prompts)):
        scores = by_index(await cluster.client.rerank(QUERY, documents, adapter_id=name))
        with torch.inference_mode():
            logits = [decoder.classifier(input_ids=torch.tensor([ids])).logits[0, 0] for ids in texts]
        assert scores == pytest.approx([float(logit.sigmoid()) for logit in logits], rel=0, abs=1e-5)
    with pytest.raises(InvalidRequestError, match="yes: headed scores by its classification head"):
        await cluster.client.rerank(QUERY, documents, adapter_id="headed", yes="yes", no="no")
    with pytest.raises(InvalidRequestError, match="instruction: headed has no template that takes one"):
        await cluster.client.rerank(QUERY, documents, adapter_id="headed", instruction="Find it.")


class CrossEncoder:
    """A tiny BertForSequenceClassification with one label, an adapter, and another with two labels."""

    def __init__(self, directory: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

        self.directory = directory / "model"
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({*QUERY.split(), *" ".join(DOCUMENTS).split()})]
        tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
        )
        fast_tokenizer: Any = PreTrainedTokenizerFast
        self.tokenizer = fast_tokenizer(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
        self.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        self.tokenizer.save_pretrained(self.directory)
        auto: Any = AutoModelForSequenceClassification
        self.adapters: dict[str, Path] = {}
        self.models: dict[str | None, Any] = {}
        for name, labels in ((None, 1), ("tuned", 1), ("two", 2)):
            config = AutoConfig.for_model(
                "bert",
                vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, num_labels=labels,
            )  # fmt: skip
            generator = torch.Generator().manual_seed(labels)
            if name is None:
                model = auto.from_config(config, dtype=torch.float32)
                self._fill(model, generator, "")
                model.save_pretrained(self.directory)
            else:
                model = auto.from_pretrained(
                    self.directory, dtype=torch.float32, num_labels=labels, ignore_mismatched_sizes=True
                )
                model = get_peft_model(
                    model,
                    LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "dense"], exclude_modules=["pooler"]),
                )
                self._fill(model, generator, "lora_", "classifier")
                self.adapters[name] = directory / name
                model.save_pretrained(str(self.adapters[name]))
            self.models[name] = model.eval().double()

    @staticmethod
    def _fill(model: Any, generator: Any, *parts: str) -> None:
        import torch

        for name, parameter in model.named_parameters():
            if any(part in name for part in parts) and "LayerNorm" not in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def score(self, query: str, document: str, adapter: str | None) -> float:
        import torch

        pair = self.tokenizer(query, document, return_tensors="pt")
        with torch.inference_mode():
            return float(self.models[adapter](**pair).logits[0, 0].sigmoid())


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> CrossEncoder:
    return CrossEncoder(tmp_path_factory.mktemp("cross-encoder"))


async def test_a_cross_encoder_scores_pairs_by_its_head(
    tmp_path: Path, cross_encoder: CrossEncoder, eventually: Eventually
) -> None:
    directory, flags = tmp_path / "cluster", FLAGS
    async with running_cluster(
        directory, str(cross_encoder.directory), cross_encoder.adapters, worker_flags=flags
    ) as running:
        for adapter in (None, "tuned"):
            ranking = await running.client.rerank(QUERY, DOCUMENTS[:20], adapter_id=adapter)
            truth = [cross_encoder.score(QUERY, document, adapter) for document in DOCUMENTS[:20]]
            assert by_index(ranking) == pytest.approx(truth, rel=0, abs=1e-5)
            assert len({round(score, 3) for score in truth}) > 3, "the documents matter"
        with pytest.raises(FailedPreconditionError, match="two: its classification head has 2 labels"):
            await running.client.rerank(QUERY, DOCUMENTS[:2], adapter_id="two")
        long = " ".join(DOCUMENTS)
        with pytest.raises(InvalidRequestError, match="maximum context length is 64 tokens") as refused:
            await running.client.rerank(QUERY, ["1", long])
        assert refused.value.field == "documents[1]"
        assert (await running.client.rerank(QUERY, [long], truncate=True)).usage.prompt_tokens == 64
        await eventually(running.idle)
