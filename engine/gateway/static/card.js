// A card of the gallery: one request from "Draw" to its pictures.

class Card {
  /**
   * @param {object} request what is sent to the server
   * @param {object} model as /v1/models describes it
   * @param {{again: function, failed: function, own: function}} page what the card asks of it
   */
  constructor(request, model, page) {
    this.request = request;
    this.model = model;
    this.page = page;
    this.video = model.makes === "video";
    this.id = randomId();
    this.abort = new AbortController();
    this.began = performance.now();
    this.focusAtFirst = document.activeElement; // whoever goes on typing is not interrupted
    this.pictures = [];
    this.urls = new Set();
    this.step = 0;
    this.numSteps = 0;
    this.partials = 0;
    this.build();
    this.state = "queued";
  }

  get state() {
    return this.element.dataset.state;
  }

  set state(state) {
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", String(this.active));
  }

  get active() {
    return !["finished", "failed", "cancelled"].includes(this.state);
  }

  build() {
    const { request } = this;
    const n = request.n || 1;
    this.shots = Array.from({ length: n }, () => make("div", { class: "shot empty-shot" }));
    const [width, height] = (request.size || "1x1").split("x").map(Number);
    for (const shot of this.shots) shot.style.aspectRatio = `${width} / ${height}`;
    this.bar = make("i");
    this.progress = make(
      "div",
      { class: "progress", role: "progressbar", "aria-label": "Steps", "aria-valuemin": 0 },
      this.bar,
    );
    this.stateText = make("span");
    this.clock = make("span");
    this.settings = make("ul", { class: "settings", "aria-label": "Settings" });
    this.message = make("p", { class: "error", hidden: true });
    this.buttons = make("div", { class: "buttons" });
    this.cancelButton = this.button("Cancel", () => this.cancel());
    this.element = make(
      "li",
      { class: "panel card", "data-request": this.id, "data-partials": 0 },
      make("div", { class: "shots", "data-many": n > 1 }, ...this.shots),
      this.progress,
      make(
        "div",
        { class: "body" },
        make("p", { class: "asked", title: request.prompt }, request.prompt),
        make("p", { class: "state" }, this.stateText, this.clock),
        this.settings,
        this.message,
        this.buttons,
      ),
    );
    this.showSettings(request.seed ?? null);
  }

  button(name, action) {
    const button = make("button", { type: "button", class: "ghost" }, name);
    button.setAttribute("aria-label", `${name}: ${this.request.prompt}`);
    button.addEventListener("click", action);
    this.buttons.append(button);
    return button;
  }

  showSettings(seed) {
    const { request } = this;
    const items = [seed === null ? "random seed" : `seed ${seed}`];
    if (request.size) items.push(request.size.replace("x", " × "));
    if (request.num_inference_steps) items.push(`${request.num_inference_steps} steps`);
    if (request.num_frames) items.push(`${request.num_frames} frames`);
    if (request.n > 1) items.push(`${request.n} pictures`);
    this.settings.replaceChildren(...items.map((item) => make("li", {}, item)));
    if (request.lora) {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = adapterColour(request.lora.name);
      const name = `${request.lora.name} × ${request.lora.scale}`;
      this.settings.append(make("li", {}, swatch, name));
    }
  }

  async run() {
    this.tick();
    this.page.own(this.id);
    say(`Drawing: ${this.request.prompt}`);
    try {
      const draw = this.video ? drawVideo : drawPictures;
      await draw(this.request, this.id, this.abort.signal, (news) => this.on(news));
      this.finish();
    } catch (error) {
      if (this.abort.signal.aborted) this.end("cancelled", "Cancelled", this.once("Try again"));
      else this.fail(error);
    }
  }

  on(news) {
    if (news.kind === "sent") this.state = "waiting";
    if (news.kind === "progress") this.onProgress(news);
    if (news.kind === "partial") this.onPartial(news.url);
    if (news.kind === "picture") this.onPicture(news);
    this.tick();
  }

  onProgress({ status, step, num_steps, percent }) {
    if (status === "running" || step > 0) this.state = "running";
    this.step = percent ?? step ?? this.step;
    this.numSteps = percent === undefined ? num_steps || this.numSteps : 100;
    const share = this.numSteps ? (100 * this.step) / this.numSteps : 0;
    this.bar.style.width = `${share}%`;
    this.progress.setAttribute("aria-valuemax", this.numSteps || 1);
    this.progress.setAttribute("aria-valuenow", this.step);
    this.progress.setAttribute("aria-valuetext", this.where());
  }

  onPartial(url) {
    this.partials += 1;
    this.element.dataset.partials = this.partials;
    this.show(this.shots[0], url, `Preview ${this.partials} of: ${this.request.prompt}`);
  }

  onPicture(picture) {
    const place = this.pictures.length;
    this.pictures.push(picture);
    if (picture.request_id) this.page.own(picture.request_id);
    const shot = this.shots[Math.min(place, this.shots.length - 1)];
    this.show(shot, picture.url, this.request.prompt, true);
  }

  show(shot, url, text, final = false) {
    const before = shot.dataset.url;
    if (before) {
      URL.revokeObjectURL(before);
      this.urls.delete(before);
    }
    shot.dataset.url = url;
    this.urls.add(url);
    shot.classList.remove("empty-shot");
    const shown = this.video
      ? make("video", { src: url, controls: true, loop: true, muted: true, playsinline: true })
      : make("img", { src: url, alt: text });
    if (!this.video) {
      shown.addEventListener("load", () => {
        shown.classList.toggle("small", shown.naturalWidth <= 128);
        if (final) shot.style.aspectRatio = `${shown.naturalWidth} / ${shown.naturalHeight}`;
      });
    }
    const link = { href: url, target: "_blank", "aria-label": `Open in full size: ${text}` };
    shot.replaceChildren(final && !this.video ? make("a", link, shown) : shown);
  }

  where() {
    if (this.state === "queued") return "Waits for a free connection";
    if (this.state !== "running") return "Waiting";
    if (this.video) return `${this.step} %`;
    return this.numSteps ? `Step ${this.step} of ${this.numSteps}` : "Running";
  }

  /** Show the time that has passed and where the request is. */
  tick() {
    if (!this.active) return;
    this.stateText.textContent = this.where();
    this.clock.textContent = seconds((performance.now() - this.began) / 1000);
  }

  finish() {
    const first = this.pictures[0];
    const seed = Math.min(...this.pictures.map((picture) => picture.seed ?? Infinity));
    this.seed = Number.isFinite(seed) ? seed : null;
    const again = (seed) => this.page.again({ ...this.request, seed }, this.model);
    this.end("finished", ranWith(first.metrics), {
      "Re-run": () => again(this.seed),
      Vary: () => again(randomSeed()),
      Download: () => this.download(),
      "Copy settings": (button) => this.copy(button),
    });
    this.showSettings(this.seed);
    if (first.metrics) {
      const { queue_ms: queued, run_ms: ran } = first.metrics;
      this.clock.textContent = seconds((queued + ran) / 1000);
      this.clock.title = `${seconds(queued / 1000)} in the queue, ${seconds(ran / 1000)} running`;
    }
    say(`Finished: ${this.request.prompt}`);
  }

  fail(error) {
    this.end("failed", "Failed", this.once("Try again"));
    this.message.textContent = error.message;
    this.message.hidden = false;
    say(`Failed: ${error.message}`);
    this.page.failed(error, this.focusAtFirst);
  }

  /** Come to an end; the buttons are for what can be done now, by name. */
  end(state, text, buttons) {
    const hadFocus = document.activeElement === this.cancelButton;
    this.state = state;
    this.stateText.textContent = text;
    this.cancelButton.remove();
    this.progress.setAttribute("aria-valuetext", text);
    for (const [name, action] of Object.entries(buttons)) {
      const button = this.button(name, () => action(button));
    }
    if (hadFocus) this.buttons.firstElementChild.focus();
  }

  /** The one button of a request that came to nothing. */
  once(name) {
    return { [name]: () => this.page.again(this.request, this.model) };
  }

  cancel() {
    this.abort.abort();
  }

  download() {
    this.pictures.forEach((picture, place) => {
      const kind = this.video ? "mp4" : picture.output_format || "png";
      const name = `omni-engine-seed-${this.seed}${place ? `-${place}` : ""}.${kind}`;
      const link = make("a", { href: picture.url, download: name });
      link.click();
    });
  }

  async copy(button) {
    await copyText(JSON.stringify({ ...this.request, seed: this.seed }, null, 2));
    button.textContent = "Copied";
    say("Settings copied");
  }

  /** Let the pictures go. */
  remove() {
    for (const url of this.urls) URL.revokeObjectURL(url);
    this.element.remove();
  }
}

function seconds(value) {
  return `${value.toFixed(value < 9.95 ? 1 : 0)}\u00a0s`;
}

function ranWith(metrics) {
  if (!metrics || !metrics.mean_batch_size) return "Finished";
  const others = metrics.mean_batch_size - 1;
  if (others < 0.05) return "Ran alone";
  return `Ran with ${others.toFixed(1)} others on average`;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { class: "unseen" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
