"""``/v1/images/edits``: real tiny pipelines behind a server, and what happens to input pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import http.server
import io
import json
import queue
import re
import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import numpy as np
import openai
import pytest
from diffusers import StableDiffusionInpaintPipeline
from http_server import HttpServer, http_server
from PIL import Image
from tiny_models import save_tiny_stable_diffusion, tiny_stable_diffusion
from waiting import wait_for

from omni_engine import OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.gateway.byte_budget import ByteBudget, Lease
from omni_engine.engine.gateway.catalog import ServedModel
from omni_engine.engine.gateway.edit_inputs import size_like
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.picture_inputs import decode_mask, decode_picture
from omni_engine.engine.gateway.remote_pictures import fetch
from omni_engine.protocol.plans import PipelineCapabilities

STAGES = """
http: {{port: 0, image_hosts: ["127.0.0.1", "localhost"]}}
limits: {{max_input_pixels: 40000, max_message_bytes: 300000}}
stage_args:
  - stage_id: 0
    name: img2img
    engine_args:
      model: {img2img}
      step_execution: true
      default_sampling_params: {{num_inference_steps: 4, strength: 0.8, guidance_scale: 2}}
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 1
    name: inpaint
    engine_args:
      model: {inpaint}
      default_sampling_params: {{num_inference_steps: 2, strength: 1.0}}
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 2
    name: gated
    engine_args: {{model: bundled, pipeline: "gated_pipelines:GatedSteps", step_execution: true}}
    runtime: {{devices: cpu, threads: 1}}
"""


def pixels(height: int = 16, width: int = 16, channels: int = 3) -> np.ndarray[Any, Any]:
    made = np.random.default_rng(5).integers(0, 256, (height, width, channels), np.uint8)
    return made


def file_of(
    picture: np.ndarray[Any, Any] | Image.Image, kind: str = "PNG", **options: Any
) -> bytes:
    file = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(file, kind, **options)
    return file.getvalue()


PICTURE = pixels()
MASK = np.zeros((16, 16), np.uint8)
MASK[:, 8:] = 255


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("edits")
    img2img = save_tiny_stable_diffusion(folder / "img2img", img2img=True)
    inpaint = folder / "inpaint"
    tiny_stable_diffusion(StableDiffusionInpaintPipeline).save_pretrained(inpaint)
    file = folder / "stages.yaml"
    file.write_text(STAGES.format(img2img=img2img, inpaint=inpaint))
    with http_server("--config", str(file)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none is needed", max_retries=0, timeout=60
    ) as client:
        yield client


def shown(made: Any) -> list[np.ndarray[Any, Any]]:
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json)))) for item in made.data
    ]


def over_zeromq(server: HttpServer, model: str, inputs: Any, **params: Any) -> np.ndarray[Any, Any]:
    with OmniClient(server.endpoint) as engine:
        prompt = {"prompt": "a cat", "multi_modal_data": inputs}
        sampling = OmniDiffusionSamplingParams(**params)
        output = engine.submit(prompt, sampling, model=model).result(60).raise_for_error()
    assert output.images is not None
    return output.images[0]


def test_the_official_client_changes_a_picture(client: openai.OpenAI, server: HttpServer) -> None:
    made = client.images.edit(
        model="img2img", prompt="a cat", image=file_of(PICTURE), n=2,
        extra_body={
            "seed": 3, "strength": 0.5, "num_inference_steps": 6, "negative_prompt": "a dog"
        },
    )  # fmt: skip
    first, second = shown(made)
    assert made.size == "16x16"
    assert made.model_dump()["metrics"]["num_steps"] == 3
    assert not np.array_equal(first, second)
    params = {"strength": 0.5, "num_inference_steps": 6, "negative_prompt": "a dog", "seed": 3}
    same = over_zeromq(server, "img2img", {"image": PICTURE}, num_outputs_per_prompt=2, **params)
    assert np.array_equal(first, same)


def test_a_mask_says_what_changes_in_either_way(client: openai.OpenAI, server: HttpServer) -> None:
    clear = np.dstack([PICTURE, 255 - MASK])
    expected = over_zeromq(server, "inpaint", {"image": PICTURE, "mask_image": MASK}, seed=3,
                           height=16, width=16)  # fmt: skip
    for mask in (file_of(MASK), file_of(clear)):
        made = client.images.edit(
            model="inpaint", prompt="a cat", image=file_of(PICTURE), mask=mask, size="16x16",
            extra_body={"seed": 3},
        )  # fmt: skip
        assert np.array_equal(shown(made)[0], expected)
    other = client.images.edit(
        model="inpaint", prompt="a cat", image=file_of(PICTURE), mask=file_of(255 - MASK),
        size="16x16", extra_body={"seed": 3},
    )  # fmt: skip
    assert not np.array_equal(shown(other)[0], expected)


def test_the_mask_may_be_the_pictures_transparency(
    client: openai.OpenAI, server: HttpServer
) -> None:
    clear = np.dstack([PICTURE, 255 - MASK])
    made = client.images.edit(
        model="inpaint", prompt="a cat", image=file_of(clear), extra_body={"seed": 3}
    )
    expected = over_zeromq(server, "inpaint", {"image": clear, "mask_image": MASK}, seed=3,
                           height=16, width=16)  # fmt: skip
    assert np.array_equal(shown(made)[0], expected)


def test_a_stream_shows_the_change(client: openai.OpenAI) -> None:
    stream = client.images.edit(
        model="img2img", prompt="a cat", image=file_of(PICTURE), stream=True, partial_images=2,
        extra_body={"num_inference_steps": 20, "strength": 1.0},
    )  # fmt: skip
    kinds = [event.type for event in stream]
    assert kinds[-1] == "image_edit.completed"
    assert set(kinds[:-1]) == {"image_edit.partial_image"}


def test_mappings_are_json_or_bracketed(server: HttpServer) -> None:
    """Names in brackets are how OpenAI's clients write mappings in forms."""
    for fields in ({"extra_args": '{"eta_": 1}'}, {"extra_args[eta_]": "1"}):
        error = refusal(server, {"image": file_of(PICTURE)}, model="img2img", **fields)
        assert error["param"] == "extra_args.eta_"


def post(server: HttpServer, files: dict[str, bytes], **fields: str) -> tuple[int, Any]:
    boundary = "edge-of-a-part"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in {"prompt": "a cat", **fields}.items()
    ]
    parts += [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\n\r\n'
        .encode() + data + b"\r\n"
        for name, data in files.items()
    ]  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        body = b"".join(parts) + f"--{boundary}--\r\n".encode()
        connection.request("POST", "/v1/images/edits", body, kind)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def refusal(server: HttpServer, files: dict[str, bytes], **fields: str) -> dict[str, Any]:
    status, body = post(server, files, **fields)
    assert status == 400, body
    error: dict[str, Any] = body["error"]
    return error


GOOD = {"image": file_of(PICTURE)}


@pytest.mark.parametrize(
    ("files", "fields", "param", "part"),
    [
        (GOOD, {"model": "gated"}, "model", "takes no pictures"),
        ({}, {"model": "img2img"}, "image", "needs 'image'"),
        (GOOD, {"model": "inpaint"}, "mask", "needs 'mask'"),
        ({**GOOD, "mask": file_of(MASK)}, {"model": "img2img"}, "mask", "It takes: image"),
        ({**GOOD, "mask": file_of(MASK[:8])}, {"model": "inpaint"}, "mask", "16x8"),
        ({"image": b"no picture"}, {}, "image", "can't be read"),
        ({"image": GOOD["image"][:100]}, {}, "image", "can't be read"),
        ({"image": b""}, {}, "image", "can't be read"),
        ({"image": file_of(PICTURE, "GIF")}, {}, "image", "PNG, JPEG or WEBP"),
        ({"image": file_of(pixels(300, 200))}, {}, "image", "200x300"),
        (GOOD, {"strength": "2"}, "strength", "less than or equal to 1"),
        (GOOD, {"num_inference_steps": "many"}, "num_inference_steps", "integer"),
        (GOOD, {"lora": "night"}, "lora", "JSON"),
        (GOOD, {"mode": "x"}, "mode", "There is no field 'mode'"),
        (GOOD, {"stream": "perhaps"}, "stream", "boolean"),
        ({**GOOD, "pictures": b"x"}, {}, "pictures", "is a file"),
        ({}, {"image": "somewhere"}, "image", "no URL"),
        ({}, {"image": "data:image/png;base64,###"}, "image", "malformed"),
        ({}, {"image": "http://example.org/a.png"}, "image", "not fetched from example.org"),
        ({}, {"image": "file:///etc/passwd"}, "image", "no URL"),
        ({}, {"image": "http://localhost:1/"}, "image", "not public"),
        ({}, {"image": "http://127.0.0.1:1/"}, "image", "can't be asked"),
    ],
)
def test_what_is_wrong_is_named(
    server: HttpServer, files: Any, fields: dict[str, str], param: str, part: str
) -> None:
    error = refusal(server, files, **{"model": "img2img", **fields})
    assert error["param"] == param
    assert part in error["message"]


def test_fields_in_url_encoding_are_small(server: HttpServer) -> None:
    statuses = []
    for size in (1_000, 100_000):
        form = urlencode({"prompt": "x" * size, "model": "nobody", "image": "data:,"})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            connection.request("POST", "/v1/images/edits", form, kind)
            statuses.append(connection.getresponse().status)
    assert statuses == [404, 400]


def test_small_files_cannot_hold_more_than_the_engine_takes(server: HttpServer) -> None:
    large = file_of(Image.new("RGB", (200, 200)))
    assert len(large) < 1000
    status, body = post(server, {"image": large, "image[]": large, "image[0]": large},
                        model="img2img")  # fmt: skip
    assert (status, body["error"]["param"]) == (413, "image")
    undecodable = file_of(pixels(200, 200))[:5000]  # refused for what its header says
    status, body = post(server, {"image": undecodable, "image[]": undecodable,
                                 "image[0]": undecodable}, model="img2img")  # fmt: skip
    assert (status, body["error"]["param"]) == (413, "image")


def test_room_for_pictures_is_given_back(server: HttpServer) -> None:
    files = {"image": file_of(Image.new("RGB", (200, 200))), "mask": file_of(MASK)}
    for _ in range(12):  # more than there is room for at a time
        status, body = post(server, files, model="inpaint")
        assert (status, body["error"]["param"]) == (400, "mask")


def test_room_is_lent_in_order_and_never_to_those_who_left() -> None:
    got: list[str] = []

    async def want(name: str, lease: Lease, size: int) -> None:
        await lease.take(size)
        got.append(name)

    async def run() -> None:
        budget = ByteBudget(100)
        leases = {name: Lease(budget) for name in ("first", "large", "left", "small")}
        await want("first", leases["first"], 60)
        sizes = {"large": 70, "left": 90, "small": 30}
        tasks = {n: asyncio.create_task(want(n, leases[n], size)) for n, size in sizes.items()}
        await asyncio.sleep(0)
        assert got == ["first"]  # nobody overtakes, whatever fits
        tasks["left"].cancel()
        leases["first"].end()
        await asyncio.wait([tasks["large"], tasks["small"]])
        assert got == ["first", "large", "small"]
        for lease in leases.values():
            lease.end()
        await want("all", Lease(budget), 100)
        waiting = asyncio.create_task(want("late", leases["first"], 50))
        await asyncio.sleep(0)
        budget.give_back(100)
        waiting.cancel()  # in the moment in which it is lent
        await asyncio.wait([waiting])
        await asyncio.wait_for(want("all", Lease(budget), 100), 30)

    asyncio.run(run())
    assert got == ["first", "large", "small", "all", "all"]


def test_pictures_by_url(server: HttpServer, site: str) -> None:
    inline = base64.b64encode(GOOD["image"]).decode()
    answers = [
        post(server, files, model="img2img", seed="3", **fields)
        for files, fields in (
            (GOOD, {}),
            ({}, {"image": f"data:image/png;base64,{inline}"}),
            ({}, {"image": f"{site.upper()}/picture"}),
        )
    ]
    assert [status for status, _ in answers] == [200] * 3
    assert len({body["data"][0]["b64_json"] for _, body in answers}) == 1


# -- fetching


ASKED: queue.Queue[str] = queue.Queue()
LEFT: queue.Queue[str] = queue.Queue()
"""Paths that a site was asked for, and those whose answer was not waited for."""


def fetched(url: str, hosts: Sequence[str] = ("127.0.0.1",), most: int = 10_000) -> bytes:
    return asyncio.run(fetch(url, "image", hosts, most, timeout_s=1.0))


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.put(self.path)  # type: ignore[attr-defined]
        redirects = {
            "/moved": "/picture",
            "/away": "http://127.0.0.2/picture",
            "/round": "/round",
            "/latin": "/pictur\xe9",
            "/nonsense": "http://[bad/",
        }
        if self.path in redirects:
            self.send_response(302)
            self.send_header("Location", redirects[self.path])
            self.end_headers()
            return
        if "dripping" in self.path:
            return self._drip()
        self.send_response(404 if self.path == "/lost" else 200)
        self.end_headers()
        if self.path == "/slow":
            self.server.stuck.wait(20)  # type: ignore[attr-defined]
        self.wfile.write(GOOD["image"])

    def _drip(self) -> None:
        """Send a line that does not end, byte by byte, until the other side leaves."""
        chunked = b"Transfer-Encoding: chunked\r\n\r\n"
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.wfile.write(chunked if "chunk" in self.path else b"X-Long: ")
        self.connection.settimeout(0.1)
        for _ in range(600):
            try:
                if not self.connection.recv(1):
                    break
            except TimeoutError:
                self.wfile.write(b"0")
            except ConnectionError:
                break
        else:
            return
        self.server.left.put(self.path)  # type: ignore[attr-defined]

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site) as running:
        running.stuck = threading.Event()  # type: ignore[attr-defined]
        running.asked, running.left = ASKED, LEFT  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.stuck.set()  # type: ignore[attr-defined]
        running.shutdown()
        thread.join(10)


def test_a_picture_is_fetched_and_redirects_within_its_host_are_followed(site: str) -> None:
    for path in ("/picture", "/moved", "/pictur\xe9?a=\u6f22 \xe9#\xe9", "/latin"):
        assert fetched(site + path) == GOOD["image"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/away", "not fetched from 127.0.0.2"),
        ("/round", "more than 3 times"),
        ("/lost", "status 404"),
        ("/nonsense", "127.0.0.1 can't be asked"),
        ("/\ud800", "127.0.0.1 can't be asked"),
        ("/slow", "it took too long"),
        ("/dripping-header", "it took too long"),
        ("/dripping-chunk", "it took too long"),
    ],
)
def test_what_is_not_fetched(site: str, path: str, part: str) -> None:
    with pytest.raises(GatewayError, match=part):
        fetched(site + path)
    if "dripping" in path:
        assert LEFT.get(timeout=60) == path


def abandoned(server: HttpServer) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        told = answer.read().decode()
    labels = 'method="POST",route="/v1/images/edits",status="499"'
    found = re.search(rf"^omni_http_requests_total\{{{labels}\}} (\S+)$", told, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_nothing_is_fetched_for_a_client_that_has_gone(server: HttpServer, site: str) -> None:
    path, before = "/dripping-for-one-who-leaves", abandoned(server)
    body = urlencode({"prompt": "x", "model": "img2img", "image": site + path})
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            "POST /v1/images/edits HTTP/1.1\r\nHost: x\r\n"
            "Content-Type: application/x-www-form-urlencoded\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        while ASKED.get(timeout=60) != path:
            pass
    assert LEFT.get(timeout=60) == path
    wait_for(lambda: abandoned(server) > before, 60)  # and not one that took too long


def test_a_redirect_to_another_allowed_host_is_refused(site: str) -> None:
    with pytest.raises(GatewayError, match="another host"):
        fetched(f"{site}/away", ["127.0.0.1", "127.0.0.2"])


def test_large_files_and_odd_urls_are_not_fetched(site: str) -> None:
    with pytest.raises(GatewayError, match="more than 10 bytes"):
        fetched(f"{site}/picture", most=10)
    for url in ("http://user@127.0.0.1/", "ftp://127.0.0.1/", "http://127.0.0.1:x/", "http:///a"):
        with pytest.raises(GatewayError):
            fetched(url)


# -- decoding


def test_pictures_are_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    turned = decode_picture(file_of(pixels(8, 4), exif=exif), "image", 1000)
    assert np.array_equal(turned, np.rot90(pixels(8, 4), -1))


def test_pictures_of_every_mode_have_three_or_four_channels() -> None:
    grey = Image.fromarray(pixels()[..., 0])
    deep = Image.fromarray(pixels()[..., 0].astype(np.uint16) * 256 + 7)
    for image, channels in [
        (grey, 3), (grey.convert("1"), 3), (grey.convert("LA"), 3), (grey.convert("P"), 3),
        (deep, 3), (Image.fromarray(pixels(channels=4)), 4),
    ]:  # fmt: skip
        assert decode_picture(file_of(image), "image", 1000).shape == (16, 16, channels)
    assert np.array_equal(decode_picture(file_of(deep), "image", 1000)[..., 0], pixels()[..., 0])


def test_a_large_picture_is_not_decoded() -> None:
    huge = file_of(Image.new("1", (20_000, 20_000)))
    assert len(huge) < 100_000
    with pytest.raises(GatewayError) as caught:
        decode_mask(huge, "mask", 1 << 24)
    assert (caught.value.param, caught.value.code) == ("mask", "limit_exceeded")


def progressive_jpeg(side: int, scans: int) -> bytes:
    """A grey progressive JPEG whose scans take a few bytes each, and the time of a whole pass."""

    def segment(marker: int, data: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data

    def table(kind: int, symbol: int) -> bytes:  # of one code, the bit 0
        return segment(0xC4, bytes([kind, 1, *[0] * 15, symbol]))

    blocks = (side // 8) ** 2
    frame = struct.pack(">BHHB", 8, side, side, 1) + b"\x01\x11\x00"
    begin = b"\xff\xd8" + segment(0xDB, bytes([0, *[1] * 64])) + segment(0xC2, frame)
    first = segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + bytes(blocks // 8)
    run = int(f"0{blocks - 2**14:014b}1", 2).to_bytes(2, "big")  # so many blocks of nothing
    more = segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + run
    return begin + table(0x00, 0) + table(0x10, 0xE0) + first + more * (scans - 1) + b"\xff\xd9"


def test_a_jpeg_of_very_many_scans_is_not_decoded() -> None:
    few, many = progressive_jpeg(1024, 30), progressive_jpeg(1024, 1000)
    assert len(many) < 20_000
    assert decode_picture(few, "image", 1 << 24).shape == (1024, 1024, 3)
    with pytest.raises(GatewayError, match="too many scans") as caught:
        decode_picture(many, "image", 1 << 24)
    assert (caught.value.status, caught.value.param) == (400, "image")


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_bad_requests_and_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for kind in ("PNG", "JPEG", "WEBP"):
        data = bytearray(file_of(pixels(), kind))
        for _ in range(6):
            data[rng.integers(len(data))] = rng.integers(256)
        with contextlib.suppress(GatewayError):
            decode_picture(bytes(data[: rng.integers(1, len(data) + 1)]), "image", 1000)


@pytest.mark.parametrize(
    ("picture", "usual", "expected"),
    [
        ((16, 16), (64, 64), (64, 64)),
        ((100, 200), (64, 64), (48, 88)),
        ((3000, 10), (64, 64), (512, 8)),
        ((30, 50), (None, None), (32, 48)),
    ],
)
def test_a_result_has_its_inputs_proportions(picture: Any, usual: Any, expected: Any) -> None:
    able = PipelineCapabilities("P", size_multiple=8)
    defaults = dict(zip(("height", "width"), usual, strict=True))
    model = ServedModel("m", able, defaults, step_execution=False)
    assert size_like({"image": np.zeros((*picture, 3))}, model, 512) == expected
