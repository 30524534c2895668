"""What stepping costs and what it gains, on the bundled model.

    python benchmarks/stepping.py [--rows 1 2 4 8] [--steps 12] [--repeat 5]
    python benchmarks/stepping.py --stream [--rate 1.5] [--requests 60]

The first form times whole generations (text encoders, denoising, decode) of a number of requests in
one process and one thread, three ways: a loop written by hand for this model that keeps everything
in batches, cooperative stepping, and diffusers called once per request. Processor time, so that
other load on the machine does not count; medians of interleaved runs.

The second form sends one Poisson stream of requests with mixed step counts to an engine in request
mode and to one in step mode, and compares what the requests waited for, in wall time: run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

from omni_engine import Omni, OmniDiffusionSamplingParams
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.stages.contracts import DiffusionRequestBatch
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.signatures import diffusers_capabilities

SIZE = 64
GUIDANCE = 3.0
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple")
STEP_COUNTS = (4, 8, 20, 50)


def prompt(index: int) -> str:
    return f"a {COLOURS[index % len(COLOURS)]} circle on a white background"


@torch.no_grad()
def by_hand(pipe: QwenImagePipeline, rows: int, steps: int) -> Any:
    """The pipeline's own arithmetic, once for the whole batch."""
    embeds, mask = pipe.encode_prompt([prompt(i) for i in range(rows)])
    blank, blank_mask = pipe.encode_prompt([" "], num_images_per_prompt=rows)
    generators = [torch.Generator().manual_seed(i) for i in range(rows)]
    latents = pipe.prepare_latents(rows, 16, SIZE, SIZE, embeds.dtype, "cpu", generators, None)
    side = SIZE // pipe.vae_scale_factor // 2
    shapes = [[(1, side, side)]] * rows
    config = pipe.scheduler.config
    mu = calculate_shift(
        latents.shape[1],
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    sigmas = np.linspace(1.0, 1 / steps, steps)
    timesteps, _ = retrieve_timesteps(pipe.scheduler, steps, "cpu", sigmas=sigmas, mu=mu)
    pipe.scheduler.set_begin_index(0)
    for timestep in timesteps:
        moment = timestep.expand(rows).to(latents.dtype) / 1000

        def predict(states: Any, shown: Any, moment: Any = moment, noisy: Any = latents) -> Any:
            return pipe.transformer(
                hidden_states=noisy,
                timestep=moment,
                encoder_hidden_states=states,
                encoder_hidden_states_mask=shown,
                img_shapes=shapes,
                return_dict=False,
            )[0]

        wanted, unwanted = predict(embeds, mask), predict(blank, blank_mask)
        guided = unwanted + GUIDANCE * (wanted - unwanted)
        guided = guided * (wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        latents = pipe.scheduler.step(guided, timestep, latents, return_dict=False)[0]
    latents = pipe._unpack_latents(latents, SIZE, SIZE, pipe.vae_scale_factor)
    vae = pipe.vae.config
    mean, std = (
        torch.tensor(values).view(1, vae.z_dim, 1, 1, 1)
        for values in (vae.latents_mean, vae.latents_std)
    )
    decoded = pipe.vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
    return pipe.image_processor.postprocess(decoded, output_type="np")


def one_by_one(pipe: QwenImagePipeline, rows: int, steps: int) -> Any:
    return np.stack(
        [
            pipe(
                prompt(i),
                negative_prompt=" ",
                true_cfg_scale=GUIDANCE,
                height=SIZE,
                width=SIZE,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(i),
                output_type="np",
            ).images[0]
            for i in range(rows)
        ]
    )


def parameters(seed: int, steps: int) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(
        seed=seed,
        num_inference_steps=steps,
        true_cfg_scale=GUIDANCE,
        negative_prompt=" ",
        height=SIZE,
        width=SIZE,
    )


def stepped(pipeline: DiffusersPipeline, rows: int, steps: int) -> Any:
    requests: list[DiffusionRequest] = [
        build_request(prompt(i), parameters(i, steps), request_id=f"request {i}")
        for i in range(rows)
    ]
    outputs = pipeline.run_wave(DiffusionRequestBatch(tuple(requests)))
    return np.stack([(output.raise_for_error().images or [])[0] for output in outputs])


def adapted(pipe: QwenImagePipeline, prompt_cache_size: int) -> DiffusersPipeline:
    report = FusionReport(True, "")
    stepper = make_stepper(pipe, report, prompt_cache_size=prompt_cache_size)
    return DiffusersPipeline(pipe, stepper, diffusers_capabilities(pipe, report), AbortFlags())


def compare_in_process(rows: list[int], steps: int, repeat: int) -> None:
    torch.set_num_threads(1)
    pipe = QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    print(f"{'rows':>4} {'by hand':>10} {'stepped':>10} {'one by one':>11}   ", end="")
    print(f"{'stepped / by hand':>18} {'one by one / stepped':>21}")
    for count in rows:
        ways: dict[str, Callable[[], Any]] = {
            "by hand": lambda count=count: by_hand(pipe, count, steps),
            "stepped": lambda count=count: stepped_once(pipe, count, steps),
            "one by one": lambda count=count: one_by_one(pipe, count, steps),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        results = {name: run() for name, run in ways.items()}  # warm
        check_equal(results)
        for _ in range(repeat):
            for name, run in ways.items():
                started = time.process_time()
                run()
                times[name].append(time.process_time() - started)
        hand, step, single = (statistics.median(times[name]) for name in ways)
        print(f"{count:>4} {hand:>8.3f} s {step:>8.3f} s {single:>9.3f} s   ", end="")
        print(f"{step / hand:>18.2f} {single / step:>21.2f}", flush=True)


def stepped_once(pipe: QwenImagePipeline, rows: int, steps: int) -> Any:
    """A fresh adapter each time: no prompt is remembered from the run before."""
    pipeline = adapted(pipe, prompt_cache_size=256)
    try:
        return stepped(pipeline, rows, steps)
    finally:
        pipeline.stepper.close()


def check_equal(results: dict[str, Any]) -> None:
    exact = (results["one by one"] * 255).round().astype(int)
    by_hand_pixels = (results["by hand"] * 255).round().astype(int)
    assert np.abs(by_hand_pixels - exact).max() <= 2, "the loop by hand makes other pictures"
    assert np.abs(results["stepped"].astype(int) - exact).max() <= 2


def stream(rate: float, count: int, seed: int) -> None:
    """Send the same Poisson stream to both modes."""
    draw = random.Random(seed)
    arrivals, moment = [], 0.0
    for index in range(count):
        moment += draw.expovariate(rate)
        arrivals.append((moment, index, draw.choice(STEP_COUNTS)))
    found = {
        name: latencies(arrivals, step_execution=step_execution)
        for name, step_execution in (("request mode", False), ("step mode", True))
    }
    for name, values in found.items():
        mean, p95 = statistics.mean(values), sorted(values)[int(0.95 * len(values))]
        print(f"{name:>12}: mean {mean:.2f} s, p95 {p95:.2f} s")
    request, step = found["request mode"], found["step mode"]
    p95s = [sorted(values)[int(0.95 * len(values))] for values in (step, request)]
    print(f"step / request: mean {statistics.mean(step) / statistics.mean(request):.2f}", end=", ")
    print(f"p95 {p95s[0] / p95s[1]:.2f}")


def latencies(arrivals: list[tuple[float, int, int]], *, step_execution: bool) -> list[float]:
    ended: dict[str, float] = {}
    with Omni(max_num_seqs=8, step_execution=step_execution, devices="cpu", threads=1) as omni:
        omni.generate(prompt(0), parameters(0, 4))  # warm
        started, handles = time.monotonic(), []
        for moment, index, steps in arrivals:
            time.sleep(max(0.0, started + moment - time.monotonic()))
            handle = omni.submit(prompt(index), parameters(index, steps))
            handle.future.add_done_callback(
                lambda _, name=handle.request_id: ended.setdefault(name, time.monotonic())
            )
            handles.append((handle, started + moment))
        outputs: list[DiffusionOutput] = [handle.result(600) for handle, _ in handles]
    assert all(output.ok for output in outputs)
    return [ended[handle.request_id] - arrived for handle, arrived in handles]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.stream:
        stream(given.rate, given.requests, given.seed)
    else:
        compare_in_process(given.rows, given.steps, given.repeat)


if __name__ == "__main__":
    main()
