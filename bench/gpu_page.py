"""The text of docs/results/benchmarks-gpu.md, which a full run of bench.gpu on a machine with CUDA writes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.report import Report, describe_machine, describe_versions
from bench.tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks-gpu.md"
_TEXT = """# Benchmarks on CUDA

Written by `make gpu`; edits are lost with the next run. Rows are in the order in which its parts ran:

- First tests/gpu, then steps of every kind of request with torch's `set_sync_debug_mode("error")`, which raises where
  the host waits for the device, and all kernels under compute-sanitizer, where the machine has it.

- The model has the shape of Llama 3 8B, bfloat16 and random weights. Adapters have rank 16 on all linear layers, each
  in a slot of its own.
- A decode case starts its rows together, with new prompts, and times steps after the last of them has its first token:
  scheduling, forward pass and sampling, until the device is done. The context is 512 in the middle of what is timed.
  A prefill is one prompt of 4,096 tokens, from its arrival to its first token.
- `limit` is what the steps that ran take at least: the longer of the bytes they must read (weights, keys and values,
  the adapters in the batch) at the memory's bandwidth and the operations they must do at the rate of a large product.
  Both ceilings are measured before every case. `_of_limit` is the limit over the time; the numbers in the names are
  rows.
- `lora_of_limit` is 64 rows with 64 adapters, and `lora_over_base` its speed over 64 rows without.
- A profile is of steps of 64 rows with 64 adapters: the kernels that take longest, all of them together, what the host
  takes without waiting for the device, and the bytes that a step must read over the time of its kernels. A mixed step
  has a prompt's chunk beside the decode rows.
- A closed loop keeps its rows busy with prompts of 512 tokens and answers of 128. The longest silence is between two
  tokens of an answer. A cold start is from an empty process to an engine that serves; the first token comes after.
- Peers run in turn with ours, after a round that warms up; static batches of peft run until their longest answer is
  complete. Tables quote medians, with the lowest and the highest run beside them. Higher is better.

"""


@dataclass(frozen=True)
class DeviceFacts:
    """The machine and the versions of a report, including the device and its software."""

    machine: dict[str, Any]
    versions: dict[str, str]


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the machine and the versions that the figures depend on."""
    machine = describe_machine()
    versions = {name: version for name, version in describe_versions().items() if version != "not installed"}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        machine["device"] = f"{facts.name}, {facts.multi_processor_count} multiprocessors"
        machine["device_memory_gib"] = round(facts.total_memory / 2**30, 1)
        machine["processor"] = f"{facts.name} ({machine['device_memory_gib']} GiB) with {machine['processor']}"
        versions |= {"CUDA": str(torch.version.cuda), "triton": metadata.version("triton")}
    return DeviceFacts(machine, versions)


def page(report: Report) -> str:
    """Return the whole page."""
    return _TEXT + markdown(report.to_json()) + "\n"
