"""The page in a real Chromium, before a real server. Screenshots are kept in build/screenshots."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from chromium import chromium
from http_server import HttpServer, http_server
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect
from waiting import wait_for

from omni_engine import OmniClient

SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
KEY = "a-key-of-the-test"
PROMPT = "a blue star left of a yellow square on a black background"
LONG_STEPS = 900
PATIENCE_MS = 60_000
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

STAGES = """
stage_args:
  - stage_id: 0
    name: shapes
    engine_args:
      model: bundled
      step_execution: true
      max_num_seqs: 8
      lora_modules:
        - {name: night, path: "bundled:night", default_scale: 0.8}
        - {name: chalk, path: "bundled:chalk"}
      default_sampling_params: {height: 64, width: 64, num_inference_steps: 8, true_cfg_scale: 3.0}
    runtime: {devices: cpu}
  - stage_id: 1
    name: clips
    engine_args:
      model: bundled
      pipeline: "video_pipelines:GatedClips"
      step_execution: true
      default_sampling_params: {}
    runtime: {devices: cpu}
"""

WATCH_CARDS = """() => {
  window.history_of_cards = [];
  const note = () => {
    for (const card of document.querySelectorAll(".card")) {
      const picture = card.querySelector("img")?.src ?? null;
      window.history_of_cards.push([card.dataset.state, Number(card.dataset.partials), picture]);
    }
  };
  const what = { subtree: true, childList: true, attributes: true };
  new MutationObserver(note).observe(document.getElementById("gallery"), what);
}"""

PIXELS = """(image) => {
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  canvas.getContext("2d").drawImage(image, 0, 0);
  return [canvas.width, canvas.height, canvas.toDataURL()];
}"""


@dataclass
class Told:
    """What a page complained about."""

    errors: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def unexpected(self) -> list[str]:
        return [text for text in self.errors if not any(part in text for part in self.allowed)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    deploy_file = tmp_path_factory.mktemp("page") / "stages.yaml"
    deploy_file.write_text(STAGES)
    with http_server("--config", str(deploy_file), "--api-key", KEY) as server:
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[OmniClient]:
    with OmniClient(server.endpoint) as client:
        yield client


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def open_page(browser: Browser, server: HttpServer, told: Told) -> Iterator[Callable[..., Page]]:
    """Open the page, with the key unless that is asked for; it must not complain about anything."""
    contexts = []

    def open_page(key: str | None = KEY, url: str = server.url, **options: Any) -> Page:
        context = browser.new_context(viewport=options.pop("viewport", DESKTOP), **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('omni-engine-key', '{key}')")
        page = context.new_page()
        page.on("console", told.note)
        page.on("pageerror", lambda error: told.errors.append(str(error)))
        page.goto(url)
        if key is not None:
            expect(page.locator("#connection")).to_have_attribute("data-state", "live")
            expect(page.locator("#width")).to_have_attribute("placeholder", re.compile("64|16"))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert told.unexpected() == []


def aborted(client: OmniClient) -> int:
    count: int = client.metrics()["stages"][0]["requests"]["aborted"]
    return count


def newest(page: Page) -> Locator:
    return page.locator(".card").first


def draw(page: Page, prompt: str = PROMPT, **fields: str) -> Locator:
    """Fill the form in, press Draw and return the card."""
    page.fill("#prompt", prompt)
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#draw")
    expect(newest(page).locator(".asked")).to_have_text(prompt)
    name = newest(page).get_attribute("data-request")
    return page.locator(f'.card[data-request="{name}"]')


def finished(card: Locator) -> Locator:
    expect(card).to_have_attribute("data-state", "finished")
    return card


def pixels(card: Locator) -> list[Any]:
    picture = card.locator("img").first
    expect(picture).to_have_js_property("complete", True)
    found: list[Any] = picture.evaluate(PIXELS)
    return found


def seed_of(card: Locator) -> int:
    text = card.locator(".settings").inner_text()
    found = re.search(r"seed (\d+)", text)
    assert found, text
    return int(found[1])


def keep(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def tab_to(page: Page, is_there: str) -> None:
    """Press Tab until the focused element fulfils a JavaScript condition."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate(f"() => {{ const at = document.activeElement; return {is_there}; }}"):
            return
    pytest.fail(f"no Tab leads to where {is_there}")


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(server: HttpServer) -> None:
    with urllib.request.urlopen(server.url) as answer:
        headers, text = answer.headers, answer.read().decode()
    assert headers["content-type"].startswith("text/html")
    told = headers["content-security-policy"]
    policy = dict(part.split(" ", 1) for part in told.split("; "))
    assert policy["default-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in told
    assert re.findall(r"""(?:src|href)=["'](?!data:|#|/docs")[^"']*""", text) == []
    assert "url(" not in text
    assert "innerHTML" not in text
    again = urllib.request.Request(server.url, headers={"If-None-Match": headers["etag"]})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(again)


def test_previews_and_steps_come_before_the_picture_and_the_timeline_moves(
    open_page: Callable[..., Page],
) -> None:
    page = open_page(color_scheme="dark")
    timeline = page.locator("#timeline")
    boxes, still = int(timeline.get_attribute("data-boxes") or 0), timeline.screenshot()
    page.evaluate(WATCH_CARDS)
    card = draw(page, steps="60", seed="7")
    expect(card.locator("[role=progressbar]")).to_have_attribute(
        "aria-valuetext", re.compile(r"Step \d+ of 60")
    )
    expect(card).to_have_attribute("data-partials", re.compile("[1-3]"))
    keep(page, "desktop-dark-running")
    finished(card)
    history = page.evaluate("() => window.history_of_cards")
    running = [entry for entry in history if entry[0] == "running"]
    assert max(partials for _, partials, _ in running) >= 2
    previews = {picture for _, partials, picture in running if partials and picture}
    assert len(previews) >= 2
    assert history[-1][0] == "finished"
    assert pixels(card)[:2] == [64, 64]
    assert seed_of(card) == 7
    expect(card.locator(".state")).to_contain_text("Ran alone")
    expect(page.locator("#legend")).to_contain_text("yours")
    wait_for(lambda: int(timeline.get_attribute("data-boxes") or 0) >= boxes + 60)
    assert int(timeline.get_attribute("data-own") or 0) >= 60
    assert timeline.screenshot() != still
    keep(page, "desktop-dark")


def test_cancelling_one_request_aborts_it_in_the_engine_and_no_other(
    open_page: Callable[..., Page], client: OmniClient
) -> None:
    before = aborted(client)
    page = open_page()
    doomed = draw(page, "a large red heart on a white background", steps=str(LONG_STEPS))
    expect(doomed).to_have_attribute("data-state", "running")
    other = draw(page, steps="8")
    doomed.get_by_role("button", name="Cancel").click()
    expect(doomed).to_have_attribute("data-state", "cancelled")
    wait_for(lambda: aborted(client) == before + 1)
    finished(other)
    assert aborted(client) == before + 1
    keep(page, "cancelled")


def test_rerun_draws_the_same_and_vary_another(open_page: Callable[..., Page]) -> None:
    page = open_page()
    first = finished(draw(page, steps="6", seed="11"))
    drawn = pixels(first)
    first.get_by_role("button", name="Re-run").click()
    assert pixels(finished(newest(page))) == drawn
    first.get_by_role("button", name="Vary").click()
    varied = finished(newest(page))
    assert pixels(varied) != drawn
    assert seed_of(varied) != 11


def test_settings_can_be_copied_and_pictures_kept(
    open_page: Callable[..., Page], tmp_path: Path
) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"], accept_downloads=True)
    page.select_option("#adapter", "night")
    expect(page.locator("#scale-shown")).to_have_text("0.8")
    card = finished(draw(page, steps="4", seed="5"))
    expect(card.locator(".settings")).to_contain_text("night \N{MULTIPLICATION SIGN} 0.8")
    expect(page.locator("#legend")).to_contain_text("night")
    card.get_by_role("button", name="Copy settings").click()
    expect(card.get_by_role("button", name="Copy settings")).to_have_text("Copied")
    copied = json.loads(page.evaluate("() => navigator.clipboard.readText()"))
    assert copied["lora"] == {"name": "night", "scale": 0.8}
    assert (copied["prompt"], copied["seed"], copied["num_inference_steps"]) == (PROMPT, 5, 4)
    with page.expect_download() as download:
        card.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "omni-engine-seed-5.png"
    download.value.save_as(tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_more_requests_than_a_browser_has_connections_all_end(
    open_page: Callable[..., Page], client: OmniClient
) -> None:
    def completed() -> int:
        count: int = client.metrics()["stages"][0]["requests"]["completed"]
        return count

    before = completed()
    page = open_page(color_scheme="light")
    cards = [draw(page, steps="24", seed=str(seed)) for seed in range(7)]
    several = draw(page, "a white circle on a brown background", steps="4", n="4")
    keep(page, "desktop-light-running")
    for card in (*cards, several):
        finished(card)
    assert completed() == before + 8
    expect(several.locator("img")).to_have_count(4)
    assert len({pixels(card)[2] for card in cards}) == 7
    together = [card for card in cards if "others on average" in card.inner_text()]
    assert together, "requests that ran at the same time shared no step"
    keep(page, "desktop-light")


def test_a_refused_field_is_told_of_and_focused(open_page: Callable[..., Page], told: Told) -> None:
    told.allowed = ("400 (Bad Request)",)
    page = open_page()
    card = draw(page, width="65")
    expect(card).to_have_attribute("data-state", "failed")
    expect(card.locator(".error")).to_contain_text("width")
    expect(page.locator("#width")).to_be_focused()
    expect(page.locator("#width")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#form-error")).to_contain_text("multiple of 16")
    page.keyboard.press("Control+A")
    page.keyboard.type("64")
    expect(page.locator("#form-error")).to_be_hidden()
    page.fill("#prompt", " ")
    page.click("#draw")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#form-error")).to_have_text("Say what to draw.")


def test_everything_can_be_done_with_the_keyboard(
    open_page: Callable[..., Page], client: OmniClient
) -> None:
    before = aborted(client)
    page = open_page(reduced_motion="reduce")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type(PROMPT)
    tab_to(page, "at.id === 'steps'")
    page.keyboard.type(str(LONG_STEPS))
    page.keyboard.press("Control+Enter")
    card = newest(page)
    expect(card).to_have_attribute("data-state", "running")
    tab_to(page, "at.id === 'timeline'")
    expect(page.locator("#timeline")).not_to_have_attribute("data-boxes", "0")
    wait_for(lambda: (page.keyboard.press("ArrowLeft"), page.locator("#tip").is_visible())[1])
    expect(page.locator("#tip-said")).to_have_text(re.compile(r"Tick of 1 request, \d+ ms\."))
    outline = page.locator("#timeline").evaluate("(at) => getComputedStyle(at).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    tab_to(page, "(at.getAttribute('aria-label') || '').startsWith('Cancel: ')")
    page.keyboard.press("Enter")
    expect(card).to_have_attribute("data-state", "cancelled")
    expect(card.get_by_role("button", name="Try again")).to_be_focused()
    wait_for(lambda: aborted(client) == before + 1)


def test_controls_and_pictures_have_names(open_page: Callable[..., Page]) -> None:
    page = open_page()
    finished(draw(page, "<b onclick='alert(1)'>a red star</b>", steps="2"))
    expect(page.locator(".card b")).to_have_count(0)
    page.click("details.more summary")
    nameless = page.locator("button, input, select, textarea, img, a, canvas").evaluate_all(
        """(found) => found.filter((one) => one.checkVisibility() && !(
            one.labels?.length || one.getAttribute("aria-label") || one.alt || one.innerText?.trim()
        )).map((one) => one.outerHTML)"""
    )
    assert nameless == []


def test_a_phone_shows_everything_without_scrolling_sideways(
    open_page: Callable[..., Page],
) -> None:
    page = open_page(viewport=PHONE, device_scale_factor=2, is_mobile=True, has_touch=True)
    card = finished(draw(page, steps="4"))
    expect(card).to_be_in_viewport()
    for place in ("#prompt", "#timeline", ".card"):
        box = page.locator(place).first.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
    tops = [page.locator(place).bounding_box() for place in ("#form", ".live", "#gallery")]
    assert [box["y"] for box in tops if box] == sorted(box["y"] for box in tops if box)
    keep(page, "phone")


CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = parse(text).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((parse(colour)[3] ?? 1) === 1) return colour;
    }
  };
  const texts =
    "label, legend, h1, h2, .asked, .state, .settings li, .ghost, .primary, .legend li, dt, dd";
  return [...document.querySelectorAll(texts)].filter((one) => one.checkVisibility()).map((one) => {
    const pair = [light(getComputedStyle(one).color), light(ground(one))].sort((a, b) => b - a);
    return [one.className || one.tagName, (pair[0] + 0.05) / (pair[1] + 0.05)];
  });
}"""


def test_dark_and_light_follow_the_system_or_the_button(open_page: Callable[..., Page]) -> None:
    page = open_page(color_scheme="light")
    finished(draw(page, steps="2"))

    def brightness() -> int:
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert (brightness() > 384) == (scheme == "light")
        faint = [found for found in page.evaluate(CONTRASTS) if found[1] < 4.5]
        assert faint == []
    button = page.locator("#theme")
    page.emulate_media(color_scheme="light")
    button.click()
    expect(button).to_have_text("Theme: dark")
    assert brightness() < 384
    button.click()
    expect(button).to_have_text("Theme: light")
    page.emulate_media(color_scheme="dark")
    assert brightness() > 384
    page.reload()
    expect(button).to_have_text("Theme: light")


def test_the_key_is_asked_for_until_it_is_right(open_page: Callable[..., Page], told: Told) -> None:
    told.allowed = ("401 (Unauthorized)",)
    page = open_page(key=None)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    keep(page, "key")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_have_text("That was not the right key.")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    finished(draw(page, steps="2"))
    assert page.evaluate("() => Object.keys(localStorage)") == ["omni-engine-theme"]


def test_the_page_comes_back_when_the_gateway_does(
    open_page: Callable[..., Page], told: Told, tmp_path: Path
) -> None:
    told.allowed = ("net::ERR_", "503 (Service Unavailable)")
    deploy_file = tmp_path / "clips.yaml"
    deploy_file.write_text("stage_args:\n" + STAGES.partition("runtime: {devices: cpu}\n")[2])
    with http_server("--config", str(deploy_file)) as server:
        page = open_page(url=server.url)
        connection = page.locator("#connection")
        (gateway,) = [
            child
            for child in psutil.Process(server.process.pid).children()
            if "omni_engine.engine.gateway.process" in child.cmdline()
        ]
        gateway.kill()
        expect(connection).to_have_attribute("data-state", "away")
        expect(connection).to_have_attribute("data-state", "live")
        finished(draw(page, "a clip", steps="2"))
        feed = urllib.request.urlopen(f"{server.url}/v1/live")
        assert feed.readline().startswith(b":")
    with feed:
        feed.read()  # raises IncompleteRead unless the feed ends in order, with its server


def test_a_video_model_s_clip_is_shown(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.select_option("#model", "clips")
    expect(page.locator("#model-note")).to_contain_text("clips makes videos")
    expect(page.locator("#n")).to_be_hidden()
    page.fill("#frames", "6")
    card = draw(page, "a clip", width="32", height="32", steps="3", seed="9")
    finished(card)
    assert seed_of(card) == 9
    video = card.locator("video")
    expect(video).to_have_js_property("videoWidth", 32)
    assert video.evaluate("(video) => video.duration") == pytest.approx(0.5, abs=0.1)
