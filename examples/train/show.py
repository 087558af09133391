"""Prints what the base model and each adapter answer to the same prompts: greedy, with transformers and peft alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
PROMPTS = ("The for statement is used to", "Return the number of", "User: What is str.split?\nAssistant:")


@torch.no_grad()
def show(prompts: list[str], new_tokens: int, model_folder: Path, adapters_folder: Path) -> None:
    """Print a line for each prompt and voice; the first voice is the base model without an adapter."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    voices = [
        "base",
        *sorted(str(f.parent.relative_to(adapters_folder)) for f in adapters_folder.rglob("*.safetensors")),
    ]
    for voice in voices:
        base = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        model: Any = base if voice == "base" else PeftModel.from_pretrained(base, str(adapters_folder / voice))
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
            text = tokenizer.decode(output[0])
            print(f"{voice:15} {text!r}", flush=True)


def main() -> None:
    """Read the flags and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="prompts to continue")
    parser.add_argument("--new-tokens", type=int, default=48, help="most tokens to generate")
    parser.add_argument("--model", type=Path, default=ROOT / "model", help="directory of the base model")
    parser.add_argument("--adapters", type=Path, default=ROOT / "adapters", help="directory of TENANT/NAME adapters")
    arguments = parser.parse_args()
    show(list(arguments.prompts), arguments.new_tokens, arguments.model, arguments.adapters)


if __name__ == "__main__":
    main()
