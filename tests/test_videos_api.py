"""`/v1/videos` of a real server, asked by OpenAI's client and by hand: jobs, files, refusals."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import httpx2
import numpy as np
import openai
import psutil
import pytest
from families_video import VIDEO_FAMILIES
from http_server import HttpServer, http_server
from PIL import Image
from test_docs import Session, blocks
from video_pipelines import DEFAULTS, colour
from waiting import wait_for

from omni_engine import AsyncOmniClient, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.gateway.catalog import Catalog, ServedModel
from omni_engine.engine.gateway.encoders import EncoderPool
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import Gateway
from omni_engine.engine.gateway.video_encoding import (
    EncodingCancelledError,
    Sound,
    encode_video,
)
from omni_engine.engine.gateway.video_job import VideoJob
from omni_engine.engine.gateway.video_jobs import VideoJobs
from omni_engine.engine.gateway.video_models import able_to_make_videos
from omni_engine.engine.gateway.video_requests import VideoPlan, plan_of
from omni_engine.engine.gateway.video_schemas import VideoRequest
from omni_engine.engine.live_request import PROGRESS_INTERVAL_S
from omni_engine.engine.private_directory import private_directory
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.stages.config import HttpArgs, Limits

MOST_WAITING = 5
CLIPS = "video_pipelines:GatedClips"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Clips whose steps can be held, clips with sound, and a tiny Wan."""
    folder = tmp_path_factory.mktemp("videos")
    VIDEO_FAMILIES["wan"].build().save_pretrained(folder / "wan")
    config = folder / "stages.yaml"
    config.write_text(f"""
limits: {{max_waiting_requests: {MOST_WAITING}}}
stage_args:
  - stage_id: 0
    name: clips
    engine_args: {{model: bundled, pipeline: "{CLIPS}", step_execution: true, max_num_seqs: 1}}
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 1
    name: sound
    engine_args: {{model: bundled, pipeline: "video_pipelines:SoundingClips", max_num_seqs: 1}}
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 2
    name: wan
    engine_args: {{model: "{folder / "wan"}", step_execution: true}}
    runtime: {{devices: cpu, threads: 1}}
""")
    with http_server("--config", str(config)) as server:
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with (
        warnings.catch_warnings(),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # of OpenAI's own service
        yield client


@pytest.fixture
def http(server: HttpServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture
def engine(server: HttpServer) -> Iterator[OmniClient]:
    with OmniClient(server.endpoint) as client:
        yield client


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file whose existence lets held steps go on; it does in the end."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def stage_named(name: str, engine: OmniClient) -> dict[str, Any]:
    return next(stage for stage in engine.metrics()["stages"] if stage["name"] == name)


def create(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/videos", json={"prompt": "a cat", "model": "clips", **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def held(http: httpx2.Client, gate: Path, step: int) -> dict[str, Any]:
    return create(http, extra_args={"holds": [[step, str(gate)]]})


def until(http: httpx2.Client, video: dict[str, Any], status: str) -> dict[str, Any]:
    def there() -> Any:
        found = http.get(f"/v1/videos/{video['id']}").json()
        assert found["status"] in (status, "queued", "in_progress"), found
        return found if found["status"] == status else None

    return dict(wait_for(there, 60))


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def decoded(data: bytes) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """A file's rate and pictures."""
    with av.open(io.BytesIO(data)) as container:
        rate = container.streams.video[0].average_rate
        return rate, [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_a_video_is_made_and_fetched_by_openais_client(
    client: openai.OpenAI, engine: OmniClient
) -> None:
    """The file has the frames that the engine makes of the same request, at the right rate."""
    ours = {"fps": 9, "num_inference_steps": 2, "seed": 11, "guidance_scale": 3.0}
    video = client.videos.create_and_poll(
        prompt="a cat", model="wan", seconds="1", size="32x16", poll_interval_ms=100,
        extra_body=ours,
    )  # fmt: skip
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.size, video.seconds, video.prompt) == ("32x16", "1", "a cat")
    assert video.completed_at is not None
    assert video.expires_at == pytest.approx(video.completed_at + 3600, abs=2)
    told = video.model_dump()
    assert (told["seed"], told["fps"], told["num_frames"]) == (11, 9, 9)
    assert told["metrics"]["num_steps"] == 2
    content = client.videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4"
    rate, pictures = decoded(content.read())
    assert (rate, len(pictures), pictures[0].shape) == (9, 9, (16, 32, 3))

    params = OmniDiffusionSamplingParams(
        num_frames=9, width=32, height=16, num_inference_steps=2, seed=11, guidance_scale=3.0
    )
    (output,) = engine.generate("a cat", params, model="wan")
    frames = output.raise_for_error().frames
    assert frames is not None
    lost = np.abs(np.stack(pictures).astype(int) - frames[0]).mean()
    shuffled = np.abs(np.stack(pictures[::-1]).astype(int) - frames[0]).mean()
    assert lost < 25
    assert lost < shuffled


def test_progress_goes_with_the_steps(
    http: httpx2.Client, engine: OmniClient, gate: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    video = create(
        http, seed=5, num_inference_steps=20,
        extra_args={"holds": [[9, str(first)], [10, str(gate)]]},
    )  # fmt: skip
    assert (video["object"], video["status"], video["progress"]) == ("video", "queued", 0)
    assert (video["size"], video["seconds"], video["num_frames"]) == ("16x16", "0.333333", 4)
    at = f"/v1/videos/{video['id']}"
    wait_for(lambda: http.get(at).json()["progress"] == 5)
    told_at = engine.metrics()["uptime_s"]
    wait_for(lambda: engine.metrics()["uptime_s"] > told_at + 2 * PROGRESS_INTERVAL_S)
    first.touch()
    half = wait_for(lambda: (found := http.get(at).json())["progress"] >= 50 and found)
    assert half["progress"] == 50
    assert half["status"] == "in_progress"
    refused = http.get(f"{at}/content")
    assert refused.status_code == 409
    assert error_of(refused)["code"] == "video_not_ready"
    assert "in_progress, " in error_of(refused)["message"]
    gate.touch()
    done = until(http, video, "completed")
    assert (done["progress"], done["seed"], done["fps"]) == (100, 5, DEFAULTS["fps"])
    rate, pictures = decoded(http.get(f"{at}/content").content)
    assert (rate, len(pictures)) == (12, 4)
    for index, picture in enumerate(pictures):
        assert np.abs(picture.astype(int) - colour(5, index)).max() <= 6


def test_a_job_goes_on_without_its_client_and_ends_with_its_deletion(
    server: HttpServer, http: httpx2.Client, engine: OmniClient, gate: Path
) -> None:
    before = stage_named("clips", engine)["requests"]
    with httpx2.Client(base_url=server.url) as passing:
        running, waiting = held(passing, gate, step=2), create(passing)
    wait_for(lambda: http.get(f"/v1/videos/{running['id']}").json()["progress"] > 0)
    assert http.get(f"/v1/videos/{waiting['id']}").json()["status"] == "queued"
    for video in (running, waiting):
        deleted = http.delete(f"/v1/videos/{video['id']}")
        assert deleted.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
        assert http.get(f"/v1/videos/{video['id']}").status_code == 404
        assert http.delete(f"/v1/videos/{video['id']}").status_code == 404
    # The one that waited has ended at once, and after the other one was told to.
    wait_for(lambda: stage_named("clips", engine)["requests"]["aborted"] > before["aborted"])
    gate.touch()
    wait_for(lambda: stage_named("clips", engine)["running"] == 0)
    after = stage_named("clips", engine)["requests"]
    assert after["aborted"] == before["aborted"] + 2
    assert after["completed"] == before["completed"]


def test_sound_odd_sizes_parts_and_thumbnails(http: httpx2.Client) -> None:
    wanted = {"prompt": "a cat", "model": "sound", "size": "17x15", "num_frames": 6, "fps": 5}
    named = {"X-Request-Id": "my-video"}
    video = http.post("/v1/videos", json={**wanted, "seed": 9}, headers=named).json()
    assert video["request_id"] == "my-video"
    assert until(http, video, "completed")["size"] == "18x16"
    at = f"/v1/videos/{video['id']}/content"
    whole = http.get(at)
    with av.open(io.BytesIO(whole.content)) as container:
        track = container.streams.audio[0]
        assert (track.codec_context.name, track.layout.name) == ("aac", "stereo")
        heard = np.concatenate([f.to_ndarray() for f in container.decode(audio=0)], axis=1)
    assert heard.shape[1] / track.rate == pytest.approx(1, abs=0.15)
    assert np.abs(heard[0]).max() > 0.5
    assert np.corrcoef(heard[0], heard[1])[0, 1] < -0.9
    _, pictures = decoded(whole.content)
    assert len(pictures) == 6
    for index, picture in enumerate(pictures):
        assert picture.shape == (16, 18, 3)
        assert np.abs(picture.astype(int) - colour(9, index)).max() <= 8

    assert whole.content.index(b"moov") < whole.content.index(b"mdat")
    part = http.get(at, headers={"Range": "bytes=100-299"})
    assert (part.status_code, part.content) == (206, whole.content[100:300])
    assert part.headers["content-range"] == f"bytes 100-299/{len(whole.content)}"
    for asked, status in [("bytes=9999999-", 416), ("bytes=5-1", 400), ("lines=1-2", 400)]:
        refused = http.get(at, headers={"Range": asked})
        assert (refused.status_code, error_of(refused)["param"]) == (status, "Range")
        size = refused.headers.get("content-range")
        assert size == (f"bytes */{len(whole.content)}" if status == 416 else None)

    small = http.get(at, params={"variant": "thumbnail"})
    assert small.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(small.content)).size == (17, 15)
    refused = http.get(at, params={"variant": "spritesheet"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "variant")


def test_a_picture_to_start_from(client: openai.OpenAI, http: httpx2.Client) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 40, 20)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    wanted: dict[str, Any] = {"prompt": "a cat", "model": "sound"}
    upload = ("start.png", buffer.getvalue(), "image/png")
    ours = {"extra_body": {"num_frames": 2}}
    form = {"prompt": (None, "a cat"), "model": (None, "sound"), "num_frames": (None, "2")}
    videos = [
        client.videos.create(**wanted, **ours, input_reference=upload).model_dump(),
        http.post("/v1/videos", files={**form, "input_reference[image_url]": (None, url)}).json(),
        create(http, **wanted, num_frames=2, input_reference={"image_url": url}),
        create(http, **wanted, num_frames=2, input_reference=url),
    ]
    for video in videos:
        until(http, video, "completed")
        _, pictures = decoded(http.get(f"/v1/videos/{video['id']}/content").content)
        assert np.abs(pictures[0].astype(int) - (200, 40, 20)).max() <= 8


@pytest.mark.parametrize(
    ("fields", "status", "param", "told"),
    [
        ({"prompt": ""}, 400, "prompt", "at least 1 character"),
        ({"prompt": None}, 400, "prompt", "string"),
        ({"model": "clipz"}, 404, "model", "Served: clips, sound, wan"),
        ({"num_frame": 4}, 400, "num_frame", "Did you mean 'num_frames'?"),
        ({"duration": 4}, 400, "duration", "Did you mean 'seconds'?"),
        ({"n": 2}, 400, "n", "less than or equal to 1"),
        ({"size": "16"}, 400, "size", "WIDTHxHEIGHT"),
        ({"size": "20x16"}, 400, "size", "20"),
        ({"seconds": True}, 400, "seconds", "number"),
        ({"seconds": "nan"}, 400, "seconds", "finite"),
        ({"seconds": "long"}, 400, "seconds", "number"),
        ({"seconds": 0}, 400, "seconds", "greater than 0"),
        ({"seconds": 1, "num_frames": 4}, 400, "num_frames", "are 12 frames"),
        ({"fps": 0}, 400, "fps", "greater than or equal to 0.1"),
        ({"num_frames": 5000}, 400, "num_frames", "at most 1024"),
        ({"seed": -1}, 400, "seed", "greater than or equal to 0"),
        ({"lora": {"name": "nobody"}}, 404, "lora.name", "nobody"),
        ({"lora": {"name": "x", "scal": 1}}, 400, "lora.scal", "Did you mean 'scale'?"),
        ({"extra_args": {"hold": 1}}, 400, "extra_args.hold", "holds"),
        ({"input_reference": "data:image/png;base64,AA=="}, 400, "input_reference", "no picture"),
        ({"model": "sound", "input_reference": "x"}, 400, "input_reference", "no URL"),
        ({"model": "sound", "input_reference": "data:,x"}, 400, "input_reference", "can't be read"),
        ({"input_reference": {"file_id": "f"}}, 400, "input_reference.file_id", "upload"),
    ],
)  # fmt: skip
def test_what_can_not_be_made_is_refused(
    http: httpx2.Client, fields: dict[str, Any], status: int, param: str, told: str
) -> None:
    wanted = {"prompt": "a cat", "model": "clips", **fields}
    answer = http.post("/v1/videos", json=wanted)
    assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert told in error["message"]


def test_other_bodies_and_unknown_videos_are_refused(http: httpx2.Client) -> None:
    assert http.post("/v1/videos", content=b"{").status_code == 415
    broken = http.post("/v1/videos", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, error_of(broken)["code"]) == (400, "invalid_json")
    for answer in (
        http.get("/v1/videos/video_0"),
        http.get("/v1/videos/video_0/content"),
        http.delete("/v1/videos/video_0"),
        http.get("/v1/videos", params={"after": "video_0"}),
    ):
        assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_video")
    assert error_of(http.get("/v1/videos", params={"limit": 0}))["param"] == "limit"
    assert error_of(http.get("/v1/videos", params={"order": "up"}))["param"] == "order"


def test_a_failed_video_tells_why(client: openai.OpenAI, http: httpx2.Client) -> None:
    video = client.videos.create_and_poll(
        prompt="a cat", model="clips", poll_interval_ms=50,
        extra_body={"extra_args": {"raise_text": "no cats today"}},
    )  # fmt: skip
    assert video.status == "failed"
    assert video.error is not None
    assert video.error.code == "model_error"
    assert "no cats today" in video.error.message
    with pytest.raises(openai.NotFoundError, match="no cats today"):
        client.videos.download_content(video.id)


def test_a_full_queue_refuses_and_lists_go_page_by_page(
    client: openai.OpenAI, http: httpx2.Client, gate: Path
) -> None:
    first = held(http, gate, step=0)
    wait_for(lambda: http.get(f"/v1/videos/{first['id']}").json()["status"] == "in_progress")
    made = [first, *(create(http) for _ in range(MOST_WAITING))]
    with pytest.raises(openai.RateLimitError) as caught:
        client.videos.create(prompt="a cat", model="clips")
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) >= 1

    newest_first = [video["id"] for video in reversed(made)]
    page = http.get("/v1/videos", params={"limit": 4}).json()
    assert [video["id"] for video in page["data"]] == newest_first[:4]
    assert (page["object"], page["has_more"]) == ("list", True)
    assert (page["first_id"], page["last_id"]) == (newest_first[0], newest_first[3])
    rest = http.get("/v1/videos", params={"limit": 100, "after": page["last_id"]}).json()
    assert [video["id"] for video in rest["data"]][:2] == newest_first[4:]
    assert rest["has_more"] is False
    upwards = http.get("/v1/videos", params={"order": "asc", "after": made[-2]["id"]}).json()
    assert [video["id"] for video in upwards["data"]] == [made[-1]["id"]]
    listed = [video.id for video in client.videos.list(limit=2)]  # asks for every page
    assert listed[: len(made)] == newest_first
    assert len(listed) == len(set(listed))
    for video in made:
        assert http.delete(f"/v1/videos/{video['id']}").status_code == 200


@asynccontextmanager
async def jobs_at(
    endpoint: str, reconnect_timeout_s: float = 15.0, **http: Any
) -> AsyncIterator[VideoJobs]:
    with private_directory() as directory, closing(EncoderPool(1)) as encoders:
        async with AsyncOmniClient(endpoint, reconnect_timeout_s=reconnect_timeout_s) as client:
            settings = HttpArgs(**http)
            gateway = Gateway(client, Catalog(client), settings, Limits(), encoders, directory)
            jobs = VideoJobs(gateway)
            yield jobs
            await jobs.close()


def submitted(jobs: VideoJobs, model: str = "clips", **fields: Any) -> Awaitable[VideoJob]:
    params = OmniDiffusionSamplingParams(num_frames=8, seed=1, **fields)
    return jobs.submit("a cat", {}, model, VideoPlan(params, 8.0, 8, None))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def knows(jobs: VideoJobs, job: VideoJob) -> bool:
    return job in jobs.page(None, 100, newest_first=True)[0]


def test_videos_are_forgotten_in_time(server: HttpServer) -> None:
    async def main() -> None:
        async with jobs_at(server.endpoint, result_ttl_s=0.3) as jobs:
            job = await submitted(jobs)
            await eventually(lambda: job.status == "completed")
            assert job.file is not None
            await eventually(lambda: not knows(jobs, job))
            assert jobs.page(None, 10, newest_first=True) == ([], False)

    asyncio.run(main())


def test_the_oldest_go_when_there_is_no_room(server: HttpServer) -> None:
    async def main() -> None:
        async with jobs_at(server.endpoint) as jobs:
            job = await submitted(jobs)
            await eventually(lambda: job.status == "completed")
            one = job.kept_bytes
        async with jobs_at(server.endpoint, max_kept_bytes=2 * one + one // 2) as jobs:
            made = []
            for _ in range(4):
                made.append(await submitted(jobs))
                await eventually(lambda: made[-1].status == "completed")
            assert [knows(jobs, job) for job in made] == [False, False, True, True]
            files = [Path(job.file.path) for job in made if job.file is not None]
            await eventually(lambda: len(list(files[0].parent.iterdir())) == 1 + len(files))
            held = {file.path for file in psutil.Process().open_files()}
            assert held.isdisjoint(map(str, files))  # no descriptor for an hour
            del made[:]
            assert [file.exists() for file in files] == [False, False, True, True]
        async with jobs_at(server.endpoint, max_kept_bytes=one - 1) as jobs:
            job = await submitted(jobs)
            await eventually(lambda: job.status == "failed")
            assert job.error is not None
            assert job.error.code == "result_too_large"
            assert "max_kept_bytes" in job.error.message
            assert job.file is None

    asyncio.run(main())


def test_a_video_whose_engine_dies_fails(start_own_engine: Callable[..., Omni], gate: Path) -> None:
    omni = start_own_engine(
        "bundled", pipeline=CLIPS, step_execution=True, name="clips", shutdown_timeout_s=0.2
    )

    async def main() -> None:
        async with jobs_at(omni.endpoint, reconnect_timeout_s=2.0) as jobs:
            job = await submitted(jobs, extra_args={"holds": [[2, str(gate)]]})
            await eventually(lambda: job.progress > 0)
            await asyncio.to_thread(omni.close)
            await eventually(lambda: job.status == "failed")
            assert job.error is not None
            assert (job.error.status, job.error.code) == (503, "engine_closed")
            assert knows(jobs, job)

    asyncio.run(main())


def model_that(**able: Any) -> tuple[ServedModel, PipelineCapabilities]:
    capabilities = PipelineCapabilities("Some", makes_video=True, **able)
    return ServedModel("some", capabilities, {}, True), capabilities


def planned(fields: dict[str, Any], **able: Any) -> VideoPlan:
    return plan_of(VideoRequest(prompt="a", **fields), *model_that(**able))


def test_rates_and_frames() -> None:
    """The request's rate, else the model's, else 16; a model that wants to know it is told."""
    silent = {"sampling_fields": frozenset({"num_frames"})}
    assert (planned({}, **silent).fps, planned({}, **silent).num_frames) == (16, None)
    plan = planned({"seconds": "2.5"}, **silent)
    assert (plan.params.num_frames, plan.params.fps, plan.num_frames) == (40, None, 40)
    plan = planned({"seconds": 2}, defaults={"fps": 7.0, "height": 8, "width": 4})
    assert (plan.params.num_frames, plan.params.fps, plan.size) == (14, 7, (8, 4))
    ltx = {**silent, "extra_args": frozenset({"frame_rate"})}
    for fields, fps in (
        ({}, 25),
        ({"fps": 10}, 10),
        ({"extra_args": {"frame_rate": 30}}, 30),
        ({"extra_args": {"frame_rate": 30}, "fps": 30}, 30),
    ):
        plan = planned(fields, **ltx)
        assert (plan.fps, plan.params.extra_args) == (fps, {"frame_rate": fps})
    for wrong in ({"frame_rate": 30, "fps": 29}, {"frame_rate": "fast"}, {"frame_rate": 0}):
        extra = {"frame_rate": wrong["frame_rate"]}
        with pytest.raises(GatewayError) as caught:
            planned({"extra_args": extra, "fps": wrong.get("fps")}, **ltx)
        assert caught.value.param == "extra_args.frame_rate"


def test_models_for_pictures_are_pointed_to() -> None:
    pictures = PipelineCapabilities("Some")
    with pytest.raises(GatewayError, match="use POST /v1/images/generations") as caught:
        able_to_make_videos("some", pictures)
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_a_model_that_can_not_be_loaded_is_waited_for_in_vain(tmp_path: Path) -> None:
    config = tmp_path / "stages.yaml"
    config.write_text(f"""
stage_args:
  - stage_id: 0
    name: clips
    engine_args: {{model: bundled, pipeline: "{CLIPS}", step_execution: true}}
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 1
    name: broken
    engine_args: {{model: bundled, pipeline: "support_pipelines:NoForward"}}
    runtime: {{devices: cpu, threads: 1}}
""")
    with (
        http_server("--config", str(config), ready=False) as server,
        httpx2.Client(base_url=server.url, timeout=120) as http,
    ):
        answer = http.post("/v1/videos", json={"prompt": "a cat", "model": "broken"})
        until(http, create(http), "completed")
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "stage_unavailable"
    assert "lacks forward" in error_of(answer)["message"]


def test_encoding_lays_alpha_on_white_mixes_channels_and_can_be_cancelled(tmp_path: Path) -> None:
    frames = np.zeros((3, 16, 16, 4), np.uint8)
    frames[..., 0], frames[..., 3] = 200, 64
    surround = np.ones((6, 3000), np.float32) * np.linspace(0, 0.5, 6, dtype=np.float32)[:, None]
    path = tmp_path / "clip.mp4"
    encode_video(str(path), frames, 30000 / 1001, Sound(surround, 44_100))
    rate, pictures = decoded(path.read_bytes())
    assert rate == Fraction(30000, 1001)
    assert np.abs(pictures[1].astype(int) - (241, 191, 191)).max() <= 4
    with av.open(str(path)) as container:
        track = container.streams.audio[0]
        assert (track.layout.name, track.rate) == ("mono", 44_100)
        heard = np.concatenate([f.to_ndarray() for f in container.decode(audio=0)], axis=1)
    assert heard[0, 1500:2500].mean() == pytest.approx(0.25, abs=0.05)
    asked = iter([False, True])
    with pytest.raises(EncodingCancelledError):
        encode_video(str(path), frames, 8, cancelled=lambda: next(asked))


@pytest.mark.timeout(600)
def test_the_documents_commands_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    session = Session(tmp_path)
    try:
        for language, name, text in blocks("docs/videos.md"):
            session.run(language, name, text.replace("8091", str(port)))
    finally:
        session.close()
    for name, frames in (("sun.mp4", 24), ("sun-again.mp4", 24)):
        assert len(decoded((tmp_path / name).read_bytes())[1]) == frames
    document = Path(__file__).parent.parent / "docs/videos.md"
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (document.parent / target).exists(), target
    table = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(table))) == set(VideoRequest.model_fields)
