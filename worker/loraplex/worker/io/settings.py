"""The worker's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from loraplex.contracts.artifacts.families import KV_CACHE_HELP, check_kv_cache_dtype
from loraplex.contracts.artifacts.quantization import FLAG_HELP as QUANTIZE_HELP
from loraplex.contracts.artifacts.quantization import check_device, parse_quantization
from loraplex.contracts.broker.cells import is_cell_name
from loraplex.contracts.broker.job_keys import JOB_KEY_HELP
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.settings import REDIS_URL_HELP, REDIS_URL_VARIABLE, check_bounds, setting
from loraplex.runtime.rpc.tls import CA_HELP, CERT_HELP, KEY_HELP, TlsFiles, tls_of
from loraplex.runtime.telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from loraplex.runtime.telemetry.metrics import PORT_HELP
from loraplex.runtime.tenancy.audit_log import FILE_HELP
from loraplex.worker.engine_api import MAX_DRAFT, EngineConfig, Speculation

DEVICES = ("cpu", "cuda")
# Adapters on the device at once by default.
_SLOTS = 32
# By default: answers that are computed at once, and tokens that one step may compute. A CPU's step takes longer with
# each of them; a GPU reads all weights for every step, however few they are.
_ROWS = {"cpu": 32, "cuda": 256}
_STEP_TOKENS = {"cpu": 512, "cuda": 4096}
DTYPES = ("auto", "float32", "bfloat16", "float16")
# The word of --speculative-config for no drafts.
NO_SPECULATION = "off"
# By default: bench.speculation shows a gain on a CPU; on CUDA none has been measured.
SPECULATIVE_CONFIG = {"cpu": "{}", "cuda": NO_SPECULATION}


@dataclass(frozen=True)
class WorkerSettings:
    """Claims jobs and runs them on one base model with a cache of LoRA adapters."""

    model: str = setting("transformers directory; or hash:?vocab=32000&step_ms=5&seed=1&end_after=0, a test engine")
    store: str = setting("address of the adapter store, HOST:PORT")
    redis_url: str = setting(REDIS_URL_HELP, variable=REDIS_URL_VARIABLE)
    model_name: str = setting("registered name of the base model; empty: the directory's name", "")
    worker_id: str = setting("name of this worker; empty: host and process id", "")
    device: str = setting("cpu, cuda or cuda:N", "cpu")
    dtype: str = setting("auto, float32, bfloat16 or float16", "auto")
    quantize: str = setting(QUANTIZE_HELP, "")
    kv_cache_dtype: str = setting(KV_CACHE_HELP, "")
    batch_invariant: bool = setting(
        "on CUDA: compute the same bits alone and in any batch, as on the CPU; slower",
        False,
    )
    speculative_config: str = setting(
        'drafts of tokens that a step checks, such as {"method":"suffix","num_speculative_tokens":8}, '
        f"at most {MAX_DRAFT}; {NO_SPECULATION}: none; empty: {NO_SPECULATION} on CUDA, {{}} on a CPU",
        "",
    )
    tensor_parallel: int = setting(
        "number of devices (on the CPU: processes) that share the model's weights, from --device on",
        1,
        least=1,
    )
    rows: int = setting("maximum sequences computed at once; 0: 32, on CUDA 256", 0, least=0)
    kv_blocks: int = setting("blocks of KV cache; 0: as many as memory allows", 0, least=0)
    block_size: int = setting("tokens per block", 16, least=1)
    adapter_slots: int = setting(
        "adapters on the device at once; 0: 32, on CUDA fewer where memory is short", 0, least=0
    )
    host_adapter_bytes: int = setting(
        "maximum bytes of adapters in host memory; 0: an eighth of the available memory, divided by the CUDA devices",
        0,
        least=0,
    )
    max_rank: int = setting("maximum rank of an adapter", 64, least=1)
    max_expert_rank: int = setting(
        "on CUDA: maximum rank of adapters of experts, which take memory per expert; 0: none are served",
        0,
        least=0,
    )
    step_tokens: int = setting("maximum tokens per step; 0: 512, on CUDA 4096", 0, least=0)
    itl_target_ms: float = setting(
        "target in milliseconds (on a CPU: of processor time) between an answer's tokens while prompts are computed; "
        "higher: earlier first tokens",
        50.0,
        above=0,
    )
    threads: int = setting(
        "CPU threads of the engine; 0: one for a small model, else one per core within the CPU limit", 0, least=0
    )
    cache_dir: str = setting("directory for adapters, not shared with other workers; empty: a temporary one", "")
    disk_adapter_bytes: int = setting(
        "maximum bytes of adapters on disk; 0: 10 GB, or half of the free space if less", 0, least=0
    )
    fetch_s: float = setting("timeout in seconds for fetching an adapter", 300.0, above=0)
    fetch_silent_s: float = setting("seconds without 1 MiB of new data after which a fetch ends", 10.0, above=0)
    cell: str = setting("cell that this worker takes jobs of, on the Redis of --redis-url", "main")
    tls_cert: str = setting(CERT_HELP, "")
    tls_key: str = setting(KEY_HELP, "")
    tls_ca: str = setting(CA_HELP, "")
    job_key: str = setting(JOB_KEY_HELP, "")
    health_host: str = setting("address of grpc.health.v1 and of the metrics", "127.0.0.1")
    health_port: int = setting("port of grpc.health.v1; 0: any free port", 0)
    audit: str = setting(FILE_HELP, "")
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    drain_s: float = setting(
        "seconds that running requests may take after SIGTERM",
        5.0,
    )
    stall_s: float = setting(
        "seconds without a sign of life of the engine after which this worker stops serving", 1.25, above=0
    )
    replace_s: float = setting("seconds without a sign of life of the engine after which it is replaced", 5.0)

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError or ArtifactError on one that no engine can work with."""
        check_logging(self.log_format, self.log_level)
        if (tls := self.tls_files()) is not None:
            from loraplex.contracts.broker.job_keys import check_job_key
            from loraplex.runtime.tenancy.certificates import own_name

            own_name(tls, Role.WORKER)
            check_job_key(self.job_key)
        if not is_cell_name(self.cell):
            raise ValueError(f"--cell {self.cell!r}: a cell's name has letters, digits, '-', '_' and '.'")
        if self._kind not in DEVICES:
            raise ValueError(f"--device {self.device}: not one of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: not one of {', '.join(DTYPES)}")
        check_device(parse_quantization(self.quantize), self.device)
        check_kv_cache_dtype(self.kv_cache_dtype)
        _ = self.speculation
        check_bounds(self)
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"--drain-s {self.drain_s}: 0 or more")
        if not self.replace_s >= self.stall_s:
            raise ValueError(f"--replace-s {self.replace_s}: at least --stall-s, which is {self.stall_s}")

    def engine_config(self) -> EngineConfig:
        """Return the engine's settings, with the device's defaults where they are 0."""
        values = {field.name: getattr(self, field.name) for field in fields(EngineConfig) if hasattr(self, field.name)}
        kind = self._kind
        values["rows"] = self.rows or _ROWS[kind]
        values["adapter_slots"], values["fewer_slots"] = self.adapter_slots or _SLOTS, not self.adapter_slots
        values["step_tokens"] = self.step_tokens or _STEP_TOKENS[kind]
        return EngineConfig(**values)

    @property
    def _kind(self) -> str:
        """Return which of DEVICES computes."""
        return self.device.split(":", maxsplit=1)[0]

    @property
    def speculation(self) -> Speculation | None:
        """Return how the engine drafts tokens; None: not at all. Raises ValueError."""
        text = self.speculative_config or SPECULATIVE_CONFIG[self._kind]
        if text == NO_SPECULATION:
            return None
        try:
            return Speculation.parse(text)
        except ValueError as error:
            raise ValueError(f"--speculative-config: {error}") from None

    def tls_files(self) -> TlsFiles | None:
        """Return the certificate files; None where TLS is off. Raises ValueError."""
        return tls_of(self.tls_cert, self.tls_key, self.tls_ca)
