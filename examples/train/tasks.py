"""Trains the adapters of examples/tasks.py on the real model: rank 4, every linear layer, a few minutes each.

They learn from chats that are drawn from the training's lists; the check's questions are never seen.

    python -m examples.train.tasks                     all three
    python -m examples.train.tasks --only triage       one of them
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real import ADAPTERS, real_model
from examples.tasks import CHECK, TASKS, TRAINING, Question, Task
from examples.train.adapters import TARGETS, batch_of, save
from examples.train.base import learning_rate

BASE_NAME = "SmolLM2-135M-Instruct"
RANK = 4
ROWS = 8
# Optimizer steps of each task, and how often each of its chats is drawn on average: names have to be many.
STEPS = {"extract": (160, 1), "triage": (120, 2), "sentiment": (60, 2)}

# Number of prompts of a certificate, and their seed, which is not that of examples/check.py.
CERTIFICATE_PROMPTS = 64
CERTIFICATE_SEED = 3


def tokenize(tokenizer: Any, questions: Sequence[Question]) -> list[tuple[list[int], int]]:
    """Return each chat as (ids of prompt and answer with its end token, length of the prompt)."""
    rows = []
    for question in questions:
        messages = [{"role": "user", "content": question.text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer(f"{question.answer}{tokenizer.eos_token}", add_special_tokens=False).input_ids
        rows.append((list(prompt) + list(answer), len(prompt)))
    return rows


def loss_of(model: PeftModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the answers' tokens, in nats; the head computes their logits alone.

    ids, labels: (rows, longest), int64; labels of prompt and padding are negative.
    """
    decoder: Any = model.get_base_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = decoder.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        answers = labels[:, 1:] >= 0
        logits = decoder.lm_head(hidden[answers])
    return cross_entropy(logits.float(), labels[:, 1:][answers])


def train(task: Task, arguments: argparse.Namespace) -> None:
    """Train the adapter of a task and save it under `--out`, by tenant and name."""
    torch.manual_seed(arguments.seed)
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    steps, times = STEPS[task.adapter]
    steps = arguments.steps or steps
    rows = tokenize(tokenizer, task.questions(steps * ROWS // times, arguments.seed, TRAINING))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    chance, started = random.Random(arguments.seed), time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, arguments.learning_rate, warm_up=10)
        loss = loss_of(model, *batch_of(chance.sample(rows, ROWS)))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0 or step + 1 == steps:
            spent = time.monotonic() - started
            print(f"{task.adapter} step {step + 1} of {steps}, loss {loss.item():.4f}, {spent:.0f} s", flush=True)
    save(model, arguments.out / task.tenant / task.adapter, BASE_NAME)
    write_prompts(task, arguments.out / task.tenant / task.adapter)


def write_prompts(task: Task, folder: Path) -> None:
    """Write the chats that a certificate of the adapter is made with, of the check's lists, with their answers."""
    questions = task.questions(CERTIFICATE_PROMPTS, CERTIFICATE_SEED, CHECK)
    lines = (
        json.dumps({"messages": [{"role": "user", "content": question.text}], "answer": question.answer})
        for question in questions
    )
    (folder / "certificate_prompts.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Read the flags and train the adapters one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="transformers directory of the base; default: the real model")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="directory to write TENANT/NAME under")
    parser.add_argument("--only", choices=sorted(TASKS), action="append", help="train only these; repeatable")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of {ROWS} chats each, for all alike")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak of the cosine schedule")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, chats and batches")
    arguments = parser.parse_args()
    arguments.base = arguments.base or real_model()
    for name in arguments.only or TASKS:
        train(TASKS[name], arguments)


if __name__ == "__main__":
    main()
