"""The engine's figures as Prometheus' metric families. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

WORKER_STATES = ("loading", "idle", "busy", "restarting", "dead")
_LINKS = {
    "from_clients": ("clients", "in"),
    "to_clients": ("clients", "out"),
    "from_workers": ("workers", "in"),
    "to_workers": ("workers", "out"),
}
_GAUGES = {
    "waiting": ("omni_requests_waiting", "Requests that wait for a worker."),
    "running": ("omni_requests_running", "Requests that run."),
    "oldest_waiting_s": (
        "omni_oldest_waiting_seconds",
        "Age of the request that has waited longest; 0 if none waits.",
    ),
    "healthy": ("omni_stage_healthy", "Whether a worker makes progress, or waits for work."),
    "max_num_seqs": ("omni_max_num_seqs", "Most requests of a forward; missing while loading."),
}
_COUNTERS = {
    "outputs": ("omni_outputs", "Pictures, clips, sounds or latents delivered."),
    "steps": ("omni_steps", "Denoising steps done, each request's counted by itself."),
    "forwards": ("omni_forwards", "Denoiser forwards run; a shared one counts once."),
}
_REQUESTS = {
    "received": "Requests taken in.",
    "completed": "Requests that ended well.",
    "failed": "Requests that ended with an error.",
    "aborted": "Requests that were aborted.",
}
_HISTOGRAMS = {
    "queue_s": ("omni_request_queue_seconds", "From a request's arrival until it runs."),
    "run_s": ("omni_request_run_seconds", "From a request's start until its end."),
    "total_s": ("omni_request_seconds", "From a request's arrival until its end."),
    "batch_size": ("omni_batch_size", "Requests of a batch, or of a tick with step execution."),
}
_WORKER_COUNTERS = {
    "batches": ("omni_worker_batches", "Batches run."),
    "ticks": ("omni_worker_ticks", "Ticks run, with step execution."),
    "restarts": ("omni_worker_restarts", "Processes that replaced a dead one."),
    "busy_s": ("omni_worker_busy_seconds", "Time spent on batches and ticks."),
}
_ADAPTER_COUNTERS = {
    "switches": ("omni_adapter_switches", "Forwards under other adapters than the one before."),
    "loads": ("omni_adapter_loads", "Adapters read from disk."),
    "load_s": ("omni_adapter_load_seconds", "Time that reading adapters took, beside forwards."),
    "wait_s": ("omni_adapter_wait_seconds", "Time that forwards waited for adapters."),
    "evictions": ("omni_adapter_evictions", "Adapters that left the device for others."),
}
_ADAPTER_GAUGES = {
    "on_device": ("omni_adapters_on_device", "Adapters on the device."),
    "in_memory": ("omni_adapters_in_memory", "Adapters in host memory."),
}
_PLACES = ("device", "host")


def families_of(
    metrics: Mapping[str, Any] | None, busy_ratios: Mapping[tuple[str, str], float]
) -> Iterator[Metric]:
    """Yield the families of everything that an engine tells.

    Args:
        metrics: the engine's figures as clients get them; None if it does not answer. All families
            are there then, too, without samples.
        busy_ratios: 0 to 1 by model and worker.
    """
    yield _one("omni_engine_up", "Whether the engine answers.", float(metrics is not None))
    known: Mapping[str, Any] = metrics or {"stages": (), "refused": {}, "bytes": {}}
    yield _one("omni_engine_uptime_seconds", "Since the engine's start.", known.get("uptime_s"))
    yield _one("omni_clients", "Clients of the engine, this gateway too.", known.get("clients"))
    refused = CounterMetricFamily(
        "omni_requests_refused", "Requests and messages that were refused.", labels=("code",)
    )
    for code, count in known["refused"].items():
        refused.add_metric((code,), count)
    yield refused
    moved = CounterMetricFamily(
        "omni_bytes", "Bytes that crossed the engine's sockets.", labels=("link", "direction")
    )
    for name, count in known["bytes"].items():
        moved.add_metric(_LINKS[name], count)
    yield moved
    yield from _stage_families(known["stages"])
    yield from _worker_families(known["stages"])
    yield from _adapter_families(known["stages"])
    ratio = GaugeMetricFamily(
        "omni_worker_busy_ratio",
        "Share of the time since an earlier scrape, 10 to 130 s ago, that a worker was busy.",
        labels=("model", "worker"),
    )
    for labels, value in busy_ratios.items():
        ratio.add_metric(labels, value)
    yield ratio


def _one(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=())
    if value is not None:
        family.add_metric((), value)
    return family


def _stage_families(stages: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    for key, (name, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("model",))
        for stage in stages:
            if stage[key] is not None:
                gauge.add_metric((stage["name"],), float(stage[key]))
        yield gauge
    for key, (name, text) in _COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model",))
        for stage in stages:
            counter.add_metric((stage["name"],), stage[key])
        yield counter
    for key, text in _REQUESTS.items():
        counter = CounterMetricFamily(f"omni_requests_{key}", text, labels=("model",))
        for stage in stages:
            counter.add_metric((stage["name"],), stage["requests"][key])
        yield counter
    errors = CounterMetricFamily(
        "omni_request_errors", "Requests that failed, by error.", labels=("model", "code")
    )
    for stage in stages:
        for code, count in stage["errors"].items():
            errors.add_metric((stage["name"], code), count)
    yield errors
    for key, (name, text) in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(name, text, labels=("model",))
        for stage in stages:
            told = stage["histograms"][key]
            histogram.add_metric((stage["name"],), _buckets(told), told["sum"])
        yield histogram


def _buckets(told: Mapping[str, Any]) -> list[tuple[str, float]]:
    bounds = [*(str(float(bound)) for bound in told["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(told["counts"]), strict=True))


def _worker_families(stages: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    states = GaugeMetricFamily("omni_workers", "Workers by state.", labels=("model", "state"))
    for stage in stages:
        now = [worker["state"] for worker in stage["workers"]]
        for state in WORKER_STATES:
            states.add_metric((stage["name"], state), now.count(state))
    yield states
    for key, (name, text) in _WORKER_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model", "worker"))
        for labels, worker in _workers(stages):
            counter.add_metric(labels, worker[key])
        yield counter


def _adapter_families(stages: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    told = [(names, worker["adapters"]) for names, worker in _workers(stages)]
    known = [(names, adapters) for names, adapters in told if adapters is not None]
    for key, (name, text) in _ADAPTER_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model", "worker"))
        for labels, adapters in known:
            counter.add_metric(labels, adapters[key])
        yield counter
    hits = CounterMetricFamily(
        "omni_adapter_cache_hits",
        "Needed adapters that were on the device, or in host memory.",
        labels=("model", "worker", "where"),
    )
    bytes_held = GaugeMetricFamily(
        "omni_adapter_bytes", "Weights of adapters held.", labels=("model", "worker", "where")
    )
    for labels, adapters in known:
        for place in _PLACES:
            hits.add_metric((*labels, place), adapters[f"{place}_hits"])
            bytes_held.add_metric((*labels, place), adapters[f"{place}_bytes"])
    yield hits
    yield bytes_held
    for key, (name, text) in _ADAPTER_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("model", "worker"))
        for labels, adapters in known:
            gauge.add_metric(labels, adapters[key])
        yield gauge


def _workers(
    stages: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """Yield every worker with its labels."""
    for stage in stages:
        for worker in stage["workers"]:
            yield (stage["name"], worker["worker_id"]), worker
