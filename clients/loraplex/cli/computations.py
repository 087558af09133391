"""`loraplex plan`, `quantize` and `adapters certify`: a worker process computes them, since only workers have torch."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.gguf_models import local_model, run_to_its_end, worker_command
from loraplex.cli.options import (
    STORE,
    TENANT,
    JsonOption,
    KvCacheOption,
    NameArgument,
    StoreOption,
    TenantOption,
)
from loraplex.cli.service import store_client
from loraplex.cli.terminal import (
    Activity,
    Columns,
    CommandError,
    print_fields,
    print_json,
    print_rows,
    print_table,
    print_warning,
)

if TYPE_CHECKING:
    from loraplex.contracts.artifacts.base_model import BaseModel
    from loraplex_client import FitnessCertificate, Revision, StoreClient

_PREFIX = "error: "
# A worker's line of progress, such as "measured 16 of 24 prompts".
_PROGRESS = re.compile(r"[a-z]+ \d+ of \d+ [a-z]+")
ModelDirOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory of the original base model, on this machine; for certificates."),
]


def ask_worker(command: str, flags: Mapping[str, str], progress: Callable[[str], None] = lambda line: None) -> Any:
    """Run a worker's command and return the JSON that it prints; `progress` gets its lines. Raises CommandError."""
    lines = ["it printed nothing"]
    with subprocess.Popen(
        worker_command(command, flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in filter(None, map(str.strip, process.stderr)):
            if _PROGRESS.fullmatch(line):
                progress(line)
            else:
                lines.append(line)
        printed = process.stdout.read()
    if process.returncode:
        reported = next((line for line in reversed(lines) if line.startswith(_PREFIX)), "")
        message = reported.removeprefix(_PREFIX)
        message = message or f"the computation ended with exit status {process.returncode}: {lines[-1]}"
        raise CommandError(message, 2 if reported else 1)
    return json.loads(printed)


def plan(context: typer.Context) -> None:
    """Compute what a model takes of a device or, with --cluster, the workers, routers and cost of a load."""
    run_to_its_end("plan", {}, *context.args)


def quantize(  # noqa: PLR0913, PLR0917  # one parameter a flag
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A transformers directory or a GGUF file.")],
    out: Annotated[str, typer.Argument(metavar="[OUT]", help="New directory for the copy.")] = "",
    to: Annotated[
        str,
        typer.Option(
            metavar="SCHEME",
            help="int8, int8-zero-point, int8-dynamic, int4, int4-64, int4-128, int4-dynamic or fp8, each also with "
            "+embeddings; "
            "with --report, '' leaves the weights as they are.",
        ),
    ] = "int8",
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Calibrate 4-bit weights on texts.")] = False,
    bits: Annotated[
        float,
        typer.Option(metavar="N", help="With --calibrate: maximum mean bits of a weight; sensitive layers get 8."),
    ] = 4.75,
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --calibrate: a text; default: the model writes one.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="With --calibrate: random seed.")] = 0,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with the original on this text; OUT is optional."),
    ] = None,
    kv_cache_dtype: KvCacheOption = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report to a JSON file.")
    ] = None,
) -> None:
    """Write a quantized copy of a model; adapters of the original work with it.

    [bold]loraplex quantize ./Qwen2-0.5B ./Qwen2-0.5B-int4 --to int4 --report article.txt[/]
    """
    if not out and report is None:
        raise CommandError("give OUT, the new directory, or --report FILE")
    if calibrate and not out:
        raise CommandError("--calibrate writes a copy: give OUT, the new directory")
    if kv_cache_dtype and report is None:
        raise CommandError("--kv-cache-dtype is for --report FILE: a copy has no KV cache, its workers take the flag")
    model, _ = local_model(model)
    if out:
        chosen = {"calibrate": "true", "bits": bits, "seed": seed, "texts": texts or ""} if calibrate else {}
        run_to_its_end("quantize", {"model": model, "out": out, "to": to, **chosen})
    if report is not None:
        compare_with_original(model, out or to, report, json_file, kv_cache_dtype)


def compare_with_original(
    model: str, quantized: str, text: Path, json_file: Path | None, kv_cache_dtype: str = ""
) -> None:
    """Compare a model with its quantized form, a scheme or a directory; print tables, or write a JSON file.

    Raises CommandError, OSError.
    """
    form = " with a KV cache of ".join(filter(None, (quantized or "the weights as given", kv_cache_dtype)))
    flags = {"kv-cache-dtype": kv_cache_dtype} if kv_cache_dtype else {}
    with Activity() as activity:
        activity.step(f"comparing {model} with {form} over {text}")
        figures = ask_worker("report", {"model": model, "quantized": quantized, "text": str(text), **flags})
    figures = {"model": model, "quantized": form, "file": str(text), **figures}
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print_report(figures)


def print_report(figures: Mapping[str, Any]) -> None:
    """Print the figures: sizes, errors of the weights, effect on the text, and the text before and after."""
    sizes, text, continued = figures["weight_bytes"], figures["text"], figures["continuation"]
    kv_bytes = figures["kv_bytes_per_token"]
    print_fields((("model", figures["model"]), ("quantized", figures["quantized"]), ("text", figures["file"])))
    if figures["weight_errors"]:
        columns: Columns = {
            "layers": "kind",
            "number": "layers",
            "weights": "weights",
            "max error": lambda error: f"{error['max']:.6f}",
            "mean error": lambda error: f"{error['mean']:.6f}",
            "relative": lambda error: f"{error['relative']:.4f}",
        }
        print_table(figures["weight_errors"], columns)
    before, after = text["perplexity"]["original"], text["perplexity"]["quantized"]
    print_rows(
        ("figure", "original", "quantized", "change"),
        (
            ("MiB of weights", *_pair(sizes["original"] / 2**20, sizes["quantized"] / 2**20, ".1f")),
            ("KiB of KV per token", *_pair(kv_bytes["original"] / 2**10, kv_bytes["quantized"] / 2**10, ".2f")),
            ("perplexity", *_pair(before, after, ".3f")),
        ),
    )
    print_fields(
        (
            ("tokens compared", text["tokens"]),
            ("same best token", f"{text['agreement']:.2%}"),
            ("mean divergence", f"{text['mean_kl']:.6f} nats"),
            ("largest divergence", f"{text['max_kl']:.4f} nats"),
            ("prompt", _one_line(continued["prompt"])),
            ("before", _one_line(continued["original"])),
            ("after", _one_line(continued["quantized"])),
        )
    )


def _pair(before: float, after: float, form: str) -> tuple[str, str, str]:
    return format(before, form), format(after, form), f"{after / before - 1:+.2%}"


def _one_line(text: str) -> str:
    """Return a text with its line breaks written out, so that a line of a pipe stays a line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def certify(
    name: NameArgument,
    base: Annotated[
        str,
        typer.Option(
            metavar="SCHEME|DIR",
            help="Quantization of the base, such as int8, or the directory of a quantized copy.",
        ),
    ],
    model_dir: ModelDirOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines with prompt or messages, and answer; instead of the adapter's own prompts.",
        ),
    ] = None,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Compare an adapter on a quantized base with the original, and store the figures.

    Compares whole answers to the adapter's own prompts or those of --prompts; without them, text from random prompts.

    [bold]loraplex adapters certify support --base int8 --model-dir ./Qwen2-0.5B --tenant acme[/]
    """
    if model_dir is None:
        raise CommandError("give the directory of the base model with --model-dir")
    with store_client(store, tenant) as client:
        _, revision = client.get(name)
        certificate = certify_revision(client, revision, base, model_dir, prompts)
    if as_json:
        print_json({"revision": revision.name, **vars(certificate)})
    else:
        print_certificates([replace(revision, certificates=(certificate,))])


def certify_revision(
    client: StoreClient, revision: Revision, base: str, model_dir: Path, prompts: Path | None = None
) -> FitnessCertificate:
    """Measure a revision on this machine, and keep its certificate in the store. Raises CommandError, LoraplexError."""
    from loraplex.cli.models import read_model
    from loraplex_client import FitnessCertificate

    original = read_model(str(model_dir), "model")
    quantization = _quantization_of(base, original)
    if original.digest != revision.base_digest:
        raise CommandError(
            f"--model-dir: {model_dir} has digest {original.digest}; {revision.name} is for {revision.base_digest}"
        )
    what = f"measuring {revision.name} on {quantization}"
    if prompts is not None and not prompts.is_file():
        raise CommandError(f"--prompts: {prompts} is not a file")
    with Activity() as activity, tempfile.TemporaryDirectory(prefix="loraplex-certify-") as directory:
        activity.step(what)
        client.download(revision.name, directory)
        if prompts is not None:
            _use_prompts(prompts, Path(directory))
        figures = ask_worker(
            "certify",
            {"model": str(model_dir), "quantized": base, "adapter": directory},
            lambda line: activity.step(f"{what}: {line}"),
        )
    if figures["drawn"]:
        print_warning(
            "drawn prompts judge free text, not the adapter's task: give --prompts FILE, or push it with a "
            "certificate_prompts.jsonl"
        )
    certificate = FitnessCertificate(quantization=quantization, base_digest=original.digest, **figures)
    return client.certify(revision.name, certificate)


def _quantization_of(base: str, original: BaseModel) -> str:
    """Return the quantization that a scheme, or a quantized copy's directory, has. Raises CommandError."""
    from loraplex.cli.models import read_model
    from loraplex.contracts.artifacts import ArtifactError
    from loraplex.contracts.artifacts.quantization import parse_quantization

    if base and Path(base).is_dir():
        copy = read_model(base, "model")
        if not copy.quantization or copy.original_digest not in {"", original.digest}:
            raise CommandError(f"--base: {base} is not a quantized copy of the model in --model-dir")
        return copy.quantization
    try:
        quantization = parse_quantization(base, "--base")
    except ArtifactError as error:
        raise CommandError(str(error)) from error
    if quantization is None:
        raise CommandError("--base: name a scheme, such as int8, or the directory of a quantized copy")
    return str(quantization)


def _use_prompts(file: Path, directory: Path) -> None:
    """Put the prompts of a file into the configuration of a downloaded adapter. Raises CommandError, LoraplexError."""
    from loraplex_client.adapter_directory import CONFIG_FILE, PROMPTS_FIELD, read_prompts

    config = json.loads((directory / CONFIG_FILE).read_bytes())
    (directory / CONFIG_FILE).write_text(json.dumps({**config, PROMPTS_FIELD: read_prompts(file)}), encoding="utf-8")


def print_certificates(revisions: Iterable[Revision]) -> None:
    """Print the certificates of revisions, if there are any."""
    columns: Columns = {
        "revision": lambda row: row["digest"][:19],
        "base": "quantization",
        "right": _right,
        "same": lambda row: "-" if row["same_answers"] is None else f"{row['same_answers']} of {row['prompts']}",
        "95%": _interval,
        "agreement": lambda row: f"{row['agreement']:.3f}",
        "mean KL": lambda row: f"{row['mean_kl']:.4f}",
        "max KL": lambda row: f"{row['max_kl']:.3f}",
        "prompts": lambda row: f"{row['prompts']} {'drawn' if row['drawn'] else 'own'}",
        "tokens": "tokens",
        "verdict": lambda row: row["verdict"] + (f": {row['breach']}" if row["breach"] else ""),
    }
    rows = [{"digest": revision.digest, **vars(one)} for revision in revisions for one in revision.certificates]
    if rows:
        print_table(rows, columns)


def _right(row: Mapping[str, Any]) -> str:
    if not row["expected_answers"]:
        return "-"
    return f"{row['right_original']} -> {row['right_quantized']} of {row['expected_answers']}"


def _interval(row: Mapping[str, Any]) -> str:
    """Return the 95% interval of the share that is judged."""
    from loraplex.contracts.artifacts.fitness import Figures, wilson_interval

    low, high = wilson_interval(*Figures(**{field.name: row[field.name] for field in fields(Figures)}).judged)
    return f"{low:.2f}-{high:.2f}"
