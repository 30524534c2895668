"""The options that several commands share, each defined once."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from omni_engine.cli.parsing import parse_json_object, parse_lora, parse_lora_module

if TYPE_CHECKING:
    from omni_engine.stages.settings import Settings


def option(panel: str, flag: str, text: str, metavar: str | None = None) -> Any:
    """Return an option of a command.

    Args:
        panel: under which help shows it.
        flag: its name; two for a switch.
        text: of the help.
        metavar: what stands for its value.
    """
    return typer.Option(flag, help=text, metavar=metavar, rich_help_panel=panel)


_model = functools.partial(option, "Model")
_batching = functools.partial(option, "Batching")
_adapters = functools.partial(option, "Adapters")
_workers = functools.partial(option, "Workers")
_keys = functools.partial(option, "Keys")
_limit = functools.partial(option, "Limits")
_switch = functools.partial(option, "Switches", metavar="")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help='"bundled", a hub id or a local folder. Default: the one in --config, or "bundled".',
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Where clients connect: ipc://PATH or tcp://HOST:PORT. "
        "Default: a socket in your own runtime folder.",
    ),
]
Connect = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help='The running engine; "auto" is the default address.'),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", help="Print JSON on standard output and nothing else there."
    ),
]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; None means not given. Fields are named like the settings they set."""

    config: Annotated[
        Path | None, _model("--config", "A deploy file; options given here win over it.", "FILE")
    ] = None
    name: Annotated[
        str | None, _model("--name", "The model name that clients use.", "NAME")
    ] = None  # fmt: skip
    revision: Annotated[
        str | None, _model("--revision", "Branch, tag or commit of a hub model.", "REV")
    ] = None
    variant: Annotated[
        str | None, _model("--variant", 'Variant of the weight files, such as "fp16".', "NAME")
    ] = None
    dtype: Annotated[
        str | None,
        _model("--dtype", "Of the weights: auto, float32, bfloat16 or float16.", "DTYPE"),
    ] = None
    pipeline: Annotated[
        str | None,
        _model("--pipeline", "A pipeline class of your own, or an entry point.", "MODULE:CLASS"),
    ] = None
    trust_remote_code: Annotated[
        bool | None,
        _switch(
            "--trust-remote-code/--no-trust-remote-code", "Run code that comes with a hub model."
        ),
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        _adapters("--lora-modules", "Register an adapter; repeatable. Replaces the file's list.",
                  "NAME=PATH"),
    ] = None  # fmt: skip
    default_lora: Annotated[
        str | None,
        _adapters("--default-lora", "The adapter of requests that name none.", "NAME[:SCALE]"),
    ] = None
    default_sampling_params: Annotated[
        str | None,
        _model("--default-sampling-params", "Values of what requests leave out, as a JSON object.",
               "JSON"),
    ] = None  # fmt: skip
    max_num_seqs: Annotated[
        int | None, _batching("--max-num-seqs", "Requests that share one forward pass.", "N")
    ] = None
    max_batch_rows: Annotated[
        int | None, _batching("--max-batch-rows", "Pictures that share one forward pass.", "N")
    ] = None
    max_batch_work: Annotated[
        int | None,
        _batching("--max-batch-work", "Pictures x pixels x frames of one batch.", "N"),
    ] = None
    request_batch_max_wait_ms: Annotated[
        float | None,
        _batching("--request-batch-max-wait-ms",
                  "Milliseconds an idle worker's first request waits for others like it.", "MS"),
    ] = None  # fmt: skip
    scheduling_policy: Annotated[
        str | None,
        _batching("--scheduling-policy", "grouped fills batches; fifo never overtakes.",
                  "grouped|fifo"),
    ] = None  # fmt: skip
    max_skip_ms: Annotated[
        float | None,
        _batching("--max-skip-ms", "Milliseconds that grouped may pass over a request.", "MS"),
    ] = None
    step_execution: Annotated[
        bool | None,
        _switch("--step-execution/--no-step-execution", "Join running batches between steps."),
    ] = None
    step_quantum: Annotated[
        int | None,
        _batching(
            "--step-quantum",
            "Ticks (one denoiser forward per request; a step takes one "
            "or two) until another resident group has its turn.",
            "N",
        ),
    ] = None
    max_resident_groups: Annotated[
        int | None,
        _batching("--max-resident-groups",
                  "Groups (one size, one adapter) that take turns on a worker.", "N"),
    ] = None  # fmt: skip
    max_stall_ms: Annotated[
        float | None,
        _batching("--max-stall-ms",
                  "Milliseconds per tick for encoding newcomers and decoding finished pictures.",
                  "MS"),
    ] = None  # fmt: skip
    prompt_cache_size: Annotated[
        int | None,
        _batching("--prompt-cache-size", "Outputs of the text encoders that are kept.", "N"),
    ] = None
    deterministic: Annotated[
        bool | None,
        _switch("--deterministic/--no-deterministic",
                "Pad every forward, so that pictures don't depend on batch mates by a bit; "
                "for diffusers pipelines."),
    ] = None  # fmt: skip
    cache_backend: Annotated[
        str | None,
        _batching("--cache-backend", "Step caching; not available in this version.", "NAME"),
    ] = None
    devices: Annotated[
        str | None,
        _workers("--devices", 'Such as "cuda:0,cuda:1", "0,1", "cpu" or "auto".', "DEVICES"),
    ] = None
    replicas: Annotated[
        int | None, _workers("--replicas", "Workers per device.", "N")
    ] = None  # fmt: skip
    threads: Annotated[int | None, _workers("--threads", "Threads of a CPU worker.", "N")] = None
    lora_dirs: Annotated[
        list[Path] | None,
        _adapters("--lora-dirs", "A folder from which `loras load` may register adapters; "
                  "repeatable. Replaces the file's list.", "DIR"),
    ] = None  # fmt: skip
    max_loras: Annotated[
        int | None, _adapters("--max-loras", "Adapters kept on a device.", "N")
    ] = None  # fmt: skip
    max_cpu_loras: Annotated[
        int | None,
        _adapters("--max-cpu-loras", "Adapters kept in a worker's host memory.", "N"),
    ] = None  # fmt: skip
    mixed_lora: Annotated[
        bool | None,
        _switch("--mixed-lora/--no-mixed-lora",
                "Let requests with different adapters share a forward."),
    ] = None  # fmt: skip
    max_mixed_adapters: Annotated[
        int | None,
        _adapters("--max-mixed-adapters", "Different adapters in one batch.", "N"),
    ] = None  # fmt: skip
    lora_merge: Annotated[
        str | None,
        _adapters("--lora-merge", "auto merges an adapter that has a worker for itself.",
                  "off|auto"),
    ] = None  # fmt: skip
    worker_startup_timeout_s: Annotated[
        float | None,
        _workers("--worker-startup-timeout-s", "Seconds a worker may take to load.", "S"),
    ] = None
    worker_heartbeat_timeout_s: Annotated[
        float | None,
        _workers(
            "--worker-heartbeat-timeout-s",
            "Seconds a worker may be silent before it is replaced.",
            "S",
        ),
    ] = None
    worker_stall_timeout_s: Annotated[
        float | None,
        _workers(
            "--worker-stall-timeout-s",
            "Seconds without any progress before a worker is replaced.",
            "S",
        ),
    ] = None
    worker_restart_backoff_s: Annotated[
        float | None,
        _workers(
            "--worker-restart-backoff-s",
            "Seconds until a dead worker is started again; doubles.",
            "S",
        ),
    ] = None
    max_worker_deaths: Annotated[
        int | None,
        _workers("--max-worker-deaths", "Deaths within the window before it is left alone.", "N"),
    ] = None
    worker_death_window_s: Annotated[
        float | None,
        _workers("--worker-death-window-s", "Seconds over which deaths are counted.", "S"),
    ] = None
    curve_secret_key: Annotated[
        Path | None,
        _keys("--curve-secret-key", "The engine's secret key; encrypts connections.", "FILE"),
    ] = None
    curve_clients: Annotated[
        Path | None,
        _keys("--curve-clients", "Folder with the public keys of those who may connect.", "DIR"),
    ] = None
    shutdown_timeout_s: Annotated[
        float | None,
        _workers("--shutdown-timeout-s", "Seconds that requests may finish at the end.", "S"),
    ] = None
    result_ttl_s: Annotated[
        float | None,
        _limit("--result-ttl-s", "Seconds that an undelivered result is kept.", "S"),
    ] = None
    max_message_bytes: Annotated[
        int | None, _limit("--max-message-bytes", "Bytes of one client message.", "BYTES")
    ] = None
    max_waiting_requests: Annotated[
        int | None, _limit("--max-waiting-requests", "Requests in all queues.", "N")
    ] = None
    max_waiting_per_client: Annotated[
        int | None,
        _limit("--max-waiting-per-client", "Requests of one client in all queues.", "N"),
    ] = None
    max_clients: Annotated[
        int | None,
        _limit("--max-clients", "Clients that are connected.", "N"),
    ] = None
    max_client_backlog_bytes: Annotated[
        int | None,
        _limit(
            "--max-client-backlog-bytes", "Bytes kept for a client that does not read.", "BYTES"
        ),
    ] = None
    max_prompt_chars: Annotated[
        int | None, _limit("--max-prompt-chars", "Characters of a prompt.", "N")
    ] = None
    max_pixels: Annotated[
        int | None, _limit("--max-pixels", "Width x height of a picture.", "N")
    ] = None
    max_side: Annotated[
        int | None, _limit("--max-side", "Pixels of width or height.", "N")
    ] = None  # fmt: skip
    max_frames: Annotated[int | None, _limit("--max-frames", "Frames of a video.", "N")] = None
    max_steps: Annotated[
        int | None, _limit("--max-steps", "Denoising steps of a request.", "N")
    ] = None  # fmt: skip
    max_outputs_per_prompt: Annotated[
        int | None, _limit("--max-outputs-per-prompt", "Pictures of a request.", "N")
    ] = None
    max_request_pixels: Annotated[
        int | None,
        _limit("--max-request-pixels", "Outputs x height x width x frames of a request.", "N"),
    ] = None
    max_input_pixels: Annotated[
        int | None,
        _limit("--max-input-pixels", "Width x height of an input picture.", "N"),
    ] = None
    max_adapters: Annotated[
        int | None,
        _limit("--max-adapters", "Adapters registered in a stage.", "N"),
    ] = None
    max_pending_loads: Annotated[
        int | None,
        _limit("--max-pending-loads", "Adapters that one client may be loading.", "N"),
    ] = None
    log_level: Annotated[
        LogLevel | None,
        typer.Option("--log-level", metavar="LEVEL",
                     help="What the engine logs at least: debug, info, warning or error."),
    ] = None  # fmt: skip
    log_format: Annotated[
        LogFormat | None,
        typer.Option("--log-format", metavar="FORMAT",
                     help="Lines for people (console), or one JSON object a line (json)."),
    ] = None  # fmt: skip

    def given(self) -> list[str]:
        """Return the flags that were given."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        names = [name for name, value in values if value is not None and value != []]
        return [f"--{name.replace('_', '-')}" for name in names]

    def overrides(self) -> dict[str, Any]:
        """Return the settings that were given, in the form ``load_settings`` takes.

        Raises:
            ConfigError: if an option's text can't be read.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["config"], values["log_level"], values["log_format"]
        modules = [parse_lora_module(text) for text in self.lora_modules or ()]
        values["lora_modules"] = modules or None
        values["lora_dirs"] = self.lora_dirs or None
        if self.default_lora is not None:
            name, scale = parse_lora(self.default_lora)
            values["default_lora"] = {"name": name, "scale": scale}
        if self.default_sampling_params is not None:
            values["default_sampling_params"] = parse_json_object(self.default_sampling_params)
        return {name: value for name, value in values.items() if value is not None}

    def settings(self, model: str | None, **more: Any) -> Settings:
        """Return the effective settings.

        Args:
            model: the model argument.
            more: further options, such as the endpoint.

        Raises:
            ConfigError: naming everything that is wrong.
        """
        from omni_engine.stages.settings import load_settings

        return load_settings(
            config_path=self.config, model=model, overrides={**self.overrides(), **more}
        )
