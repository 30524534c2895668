"""The deploy configuration: what a deploy file may say, as frozen models. Never imports torch.

Public names: ``DeployConfig``, ``StageConfig``, ``EngineArgs``, ``RuntimeArgs``, ``Limits``,
``CurveArgs``, ``HttpArgs``, ``LoRAModule``, ``DefaultLoRA``, ``SamplingDefaults``,
``parse_devices``, ``resolve_model``, ``resolve_adapter``, ``model_name``, ``BUNDLED_ADAPTERS``,
and from ``yaml_source`` the errors ``ConfigProblem``, ``ConfigFileError`` and
``UnsupportedConfigError``.

Files are read by ``omni_engine.stages.settings.load_settings``. It also checks what concerns
several values at once: duplicate names, defaults beyond the limits, files that don't exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from omni_engine.protocol.errors import ConfigError, nearest, shorten
from omni_engine.stages.bundled import ADAPTER_DIR, MODEL_DIR
from omni_engine.stages.yaml_source import ConfigFileError as ConfigFileError
from omni_engine.stages.yaml_source import ConfigProblem as ConfigProblem
from omni_engine.stages.yaml_source import UnsupportedConfigError as UnsupportedConfigError

BUNDLED_ADAPTERS = ("outline", "night", "studio", "silhouette", "chalk", "tiny")
"""The bundled model's adapters: an adapter's path may be ``bundled:outline``."""


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices that a valid ``runtime.devices`` names: ``("auto",)``, or a list."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(f"cuda:{part}" if part.isdecimal() else part for part in parts)


def model_name(model: str) -> str:
    """Return the name that clients use for ``model`` unless the stage gives it another."""
    return Path(model).name or model


def resolve_model(model: str, base_dir: str | os.PathLike[str]) -> str:
    """Return ``bundled`` or a hub id unchanged, and a folder as an absolute path.

    A model is a folder when it is absolute, starts with ``.`` or ``~``, has more than one slash
    (no hub id does), or names an existing folder.
    """
    if model == "bundled":
        return model
    path = os.path.join(base_dir, os.path.expanduser(model))
    local = os.path.isabs(model) or model[:1] in (".", "~") or model.count("/") > 1
    return os.path.abspath(path) if local or os.path.isdir(path) else model


def resolve_adapter(path: str, base_dir: str | os.PathLike[str]) -> Path:
    """Return the file that an adapter's path means: ``bundled:NAME``, a file, or a folder's one.

    Raises:
        ConfigError: there is no such file, a folder holds none or several, or its path is no text.
    """
    if path.startswith("bundled:"):
        return _bundled_adapter(path.removeprefix("bundled:"))
    path = os.path.join(base_dir, os.path.expanduser(path))
    if os.path.isdir(path):
        found = [name for name in _listed(path) if name.endswith(".safetensors")]
        preferred = [name for name in found if name == "pytorch_lora_weights.safetensors"] or found
        if len(preferred) == 1:
            return textual(Path(path, preferred[0]))
        message = f"the folder {path} holds {len(found)} safetensors files"
        raise ConfigError(message, hint="name the adapter's file")
    if not os.path.isfile(path):
        raise ConfigError(f"there is no file or folder {path}")
    if not path.endswith(".safetensors"):
        hint = "pickle files are never read: convert it to safetensors"
        raise ConfigError(f"{path} is not a safetensors file", hint=hint)
    return textual(Path(path))


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:  # it may have gone meanwhile
        raise ConfigError(f"the folder {folder} can't be read: {error.strerror}") from None


def textual(path: Path) -> Path:
    """Return a path as it is; raises ``ConfigError`` if it isn't UTF-8: it can't be sent."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name {shorten(str(path))} is not UTF-8", hint="rename it") from None
    return path


def _bundled_adapter(name: str) -> Path:
    if name in BUNDLED_ADAPTERS:
        return ADAPTER_DIR / f"{name}.safetensors"
    hint = f"did you mean bundled:{nearest(name, BUNDLED_ADAPTERS) or BUNDLED_ADAPTERS[0]}?"
    raise ConfigError(f"there is no bundled adapter {name!r}", hint=hint)


def _text(pattern: str, wanted: str, max_length: int = 200) -> Any:
    return Field(pattern=pattern, max_length=max_length, json_schema_extra={"wanted": wanted})


Count = Annotated[int, Field(ge=1)]
Guidance = Annotated[float, Field(ge=-1000, le=1000)]
Scale = Annotated[float, Field(ge=-100, le=100)]
Milliseconds = Annotated[float, Field(ge=0, le=600_000)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, _text(r"^\S(.*\S)?$", "text without blanks around it, <= 200 characters")]
_LORA_NAME = r"^[^\s:=]([^:=]*[^\s:=])?$"
_LORA_NAME_WANTED = "text without ':', '=' or blanks around it, <= 200 characters"
LoRAName = Annotated[str, _text(_LORA_NAME, _LORA_NAME_WANTED)]  # NAME:SCALE and NAME=PATH
_KEY_WANTED = "a key of 1 to 200 visible ASCII characters without blanks"
Key = Annotated[str, _text(r"^[\x21-\x7e]{1,200}$", _KEY_WANTED)]
_ORIGIN = r"^(\*|https?://[^\s/]+)$"
_ORIGIN_WANTED = 'an origin such as "https://example.org", or "*" for all'
Origin = Annotated[str, _text(_ORIGIN, _ORIGIN_WANTED)]
_HOST = r"^[A-Za-z0-9._:\-]+$"
_HOST_WANTED = "a host's name or address, without a port"
HostName = Annotated[str, _text(_HOST, _HOST_WANTED)]
PathText = Annotated[str, _text(r"\S", "a name or path", 4096)]
_PIPELINE = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|[A-Za-z_][\w.-]*)$"
_PIPELINE_WANTED = 'a class such as "my_package.pipelines:MyPipeline", or an entry point\'s name'
PipelineName = Annotated[str, _text(_PIPELINE, _PIPELINE_WANTED)]
_ENDPOINT = r"^(ipc://[^\s\x00]+|tcp://[^\s/]+:([0-9]{1,5}|\*))$"
_ENDPOINT_WANTED = "an address: ipc://PATH with <= 107 characters of path, or tcp://HOST:PORT"
Endpoint = Annotated[str, _text(_ENDPOINT, _ENDPOINT_WANTED, len("ipc://") + 107)]
_DEVICE = r"(cpu|(cuda:)?(0|[1-9][0-9]{0,2}))"
_DEVICES_WANTED = 'devices such as "cuda:0,cuda:1", "0,1" (the same), "cpu" or "auto"'
Devices = Annotated[str, _text(rf"^(auto|{_DEVICE}( *, *{_DEVICE})*)$", _DEVICES_WANTED, 4096)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Limits(_Model):
    """What the engine accepts at most, over all stages; larger requests are refused."""

    max_message_bytes: Annotated[int, Field(ge=1024, le=1 << 32)] = 256 << 20
    max_waiting_requests: Count = 10_000
    max_waiting_per_client: Count = 5_000
    max_clients: Count = 2_000
    max_client_backlog_bytes: Annotated[int, Field(ge=1024)] = 256 << 20
    max_prompt_chars: Count = 20_000
    max_pixels: Count = 2048 * 2048
    max_side: Count = 4096
    max_frames: Count = 1024
    max_steps: Count = 1000
    max_outputs_per_prompt: Count = 64
    max_request_pixels: Count = 2**31
    max_input_pixels: Count = 4096 * 4096
    max_adapters: Count = 10_000
    max_pending_loads: Count = 64


class CurveArgs(_Model):
    """The keys with which connections of clients are encrypted; without them none are."""

    secret_key: PathText | None = None
    clients: PathText | None = None


class HttpArgs(_Model):
    """The HTTP gateway, a process of its own; without a port there is none."""

    host: HostName = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    api_key: Key | None = None
    admin_key: Key | None = None
    cors_origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()
    image_hosts: Annotated[tuple[HostName, ...], Field(strict=False)] = ()
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 32)] = 64 << 20
    result_ttl_s: Annotated[float, Field(gt=0, le=30 * 86_400)] = 3600.0
    max_kept_bytes: Annotated[int, Field(ge=1024)] = 1 << 30
    encoder_threads: Annotated[int, Field(ge=1, le=64)] = 2


class SamplingDefaults(_Model):
    """Values for requests that leave a field out; None means the pipeline's own default."""

    height: Count | None = None
    width: Count | None = None
    num_frames: Count | None = None
    fps: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    num_inference_steps: Count | None = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    negative_prompt: str | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    num_outputs_per_prompt: Count | None = None
    strength: Annotated[float, Field(ge=0, le=1)] | None = None
    sampler: Name | None = None
    sigmas: Annotated[tuple[NotNegative, ...], Field(strict=False, min_length=1)] | None = None
    eta: NotNegative | None = None
    max_sequence_length: Count | None = None
    output_type: Literal["np", "latent"] | None = None
    extra_args: dict[str, JsonValue] | None = None

    def given(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        return self.model_dump(mode="json", exclude_none=True)


class LoRAModule(_Model):
    """An adapter that requests may name."""

    name: LoRAName
    path: PathText
    default_scale: Scale = 1.0
    preload: bool = False
    pin: bool = False

    def resolved_file(self, base_dir: str | os.PathLike[str] = ".") -> Path:
        """Return ``resolve_adapter`` of the path; loaded settings hold absolute paths."""
        return resolve_adapter(self.path, base_dir)


class DefaultLoRA(_Model):
    """The registered adapter of requests that name none; without a scale, at its default."""

    name: Name
    scale: Scale | None = None


class EngineArgs(_Model):
    """What a stage runs and how requests share its forwards."""

    model: PathText
    revision: Name | None = None
    variant: Name | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    pipeline: PipelineName | None = None
    trust_remote_code: bool = False
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 4
    max_batch_rows: Count | None = None
    max_batch_work: Count | None = None
    request_batch_max_wait_ms: Milliseconds = 0.0
    scheduling_policy: Literal["grouped", "fifo"] = "grouped"
    max_skip_ms: Milliseconds = 1000.0
    step_execution: bool = False
    step_quantum: Count = 4
    max_resident_groups: Count = 4
    max_stall_ms: Milliseconds = 100.0
    prompt_cache_size: Annotated[int, Field(ge=0)] = 256
    deterministic: bool = False
    cache_backend: Name | None = None
    lora_modules: Annotated[tuple[LoRAModule, ...], Field(strict=False)] = ()
    default_lora: DefaultLoRA | None = None
    lora_dirs: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    max_loras: Count = 8
    max_cpu_loras: Count = 64
    mixed_lora: bool = False
    max_mixed_adapters: Count | None = None
    lora_merge: Literal["off", "auto"] = "off"
    default_sampling_params: SamplingDefaults = SamplingDefaults()
    worker_startup_timeout_s: Seconds = 600.0
    worker_heartbeat_timeout_s: Seconds = 60.0
    worker_stall_timeout_s: Seconds = 600.0
    worker_restart_backoff_s: Annotated[float, Field(gt=0, le=30)] = 0.5
    max_worker_deaths: Count = 5
    worker_death_window_s: Seconds = 600.0

    @property
    def mixed_adapters_limit(self) -> int | None:
        """Different adapters in one batch at most; None if adapters are not mixed."""
        if not self.mixed_lora:
            return None
        pinned = sum(module.pin for module in self.lora_modules)
        return self.max_mixed_adapters or max(1, self.max_loras - pinned)

    def resolved_model(self, base_dir: str | os.PathLike[str] = ".") -> str:
        """Return the hub id or absolute folder to load; loaded settings hold absolute paths."""
        model = resolve_model(self.model, base_dir)
        return str(MODEL_DIR) if model == "bundled" else model


class RuntimeArgs(_Model):
    """Where a stage's workers run."""

    devices: Devices = "auto"
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None

    def worker_threads(self, workers: int, cores: int) -> int:
        """Return the torch threads of one of ``workers`` CPU workers that share ``cores``."""
        return self.threads or max(1, cores // max(1, workers))


class StageConfig(_Model):
    """One model and its workers."""

    stage_id: Annotated[int, Field(ge=0)]
    stage_type: Literal["diffusion"] = "diffusion"
    name: Name | None = None
    engine_args: EngineArgs
    runtime: RuntimeArgs = RuntimeArgs()

    @property
    def display_name(self) -> str:
        """The model name that clients use."""
        return self.name or model_name(self.engine_args.model)

    def worker_devices(self, available: Sequence[str] = ()) -> list[str]:
        """Return one device per worker.

        Args:
            available: this machine's CUDA devices; ``auto`` means these, or the CPU if empty.
        """
        devices = parse_devices(self.runtime.devices)
        if devices == ("auto",):
            devices = tuple(available) or ("cpu",)
        return [device for device in devices for _ in range(self.runtime.replicas)]

    def to_wire(self) -> dict[str, Any]:
        """Return the stage as a msgpack-able dict, for a worker process."""
        return self.model_dump(mode="json")

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Rebuild a stage from ``to_wire``'s dict."""
        return cls.model_validate(dict(wire))


class DeployConfig(_Model):
    """A whole deploy file."""

    endpoint: Endpoint | None = None
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    result_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    curve: CurveArgs = CurveArgs()
    http: HttpArgs = HttpArgs()
    limits: Limits = Limits()
    stage_args: Annotated[tuple[StageConfig, ...], Field(strict=False, min_length=1)]
