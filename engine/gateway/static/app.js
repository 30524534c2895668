// Puts the parts together: the form, the gallery, the live feed, the theme.

const MAX_CARDS = 200;
const RECONNECT_MS = 1500;
const LOADING_MS = 1500;

const gallery = {
  cards: [],

  draw(request, model) {
    const card = new Card(request, model, {
      again: (repeated, of) => this.draw(repeated, of),
      failed: (error, focus) => document.activeElement === focus && form.refused(error),
      own: (id) => timeline.own.add(id),
    });
    this.cards.unshift(card);
    byId("gallery").prepend(card.element);
    for (const old of this.cards.slice(MAX_CARDS).filter((other) => !other.active)) this.drop(old);
    this.changed();
    const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
    if (matchMedia("(max-width: 720px)").matches) card.element.scrollIntoView({ behavior, block: "center" });
    card.run().finally(() => this.changed());
  },

  drop(card) {
    this.cards.splice(this.cards.indexOf(card), 1);
    card.remove();
  },

  clear() {
    for (const card of this.cards.filter((one) => !one.active)) this.drop(card);
    this.changed();
    byId("gallery-title").focus({ preventScroll: true });
  },

  changed() {
    byId("empty").hidden = this.cards.length > 0;
    byId("clear").hidden = !this.cards.some((card) => !card.active);
  },
};

const timeline = new Timeline();
const form = new DrawForm((request, model) => gallery.draw(request, model));
const canvas = new TimelineCanvas(byId("timeline"), byId("tip"), byId("tip-said"), timeline);

function showConnection(state, text) {
  const element = byId("connection");
  if (element.dataset.state === state && element.textContent === text) return;
  element.dataset.state = state;
  element.textContent = text;
}

function showNumber(id, value, digits = 0) {
  byId(id).textContent = value === null ? "–" : value.toFixed(digits);
}

function showFigures() {
  showNumber("figure-waiting", timeline.waiting);
  showNumber("figure-running", timeline.runningCount);
  showNumber("figure-rate", timeline.rate(), 1);
  showNumber("figure-batch", timeline.meanBatch(), 1);
  const { dataset } = byId("timeline");
  dataset.boxes = timeline.boxCount;
  dataset.own = timeline.ownCount;
  showLegend();
  for (const card of gallery.cards) card.tick();
}

function showLegend() {
  const names = timeline.adapters();
  const own = timeline.ownCount > 0;
  const wanted = JSON.stringify([names, own]);
  if (byId("legend").dataset.shown === wanted) return;
  byId("legend").dataset.shown = wanted;
  const items = names.map((name) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = adapterColour(name);
    return make("li", {}, swatch, name ?? "no adapter");
  });
  if (own) items.push(make("li", {}, make("span", { class: "swatch own" }), "yours"));
  if (items.length) items.push(make("li", {}, "Height: requests in the batch"));
  byId("legend").replaceChildren(...items);
}

function describeTimeline() {
  const workers = timeline.rows.size;
  const mean = timeline.meanBatch();
  const ran = mean === null ? "nothing ran" : `${mean.toFixed(1)} requests shared a box on average`;
  const label = `Timeline of ${workers} ${workers === 1 ? "worker" : "workers"}; in the last ${WINDOW_S} seconds ${ran}`;
  byId("timeline").setAttribute("aria-label", label);
}

/** Follow the live feed, for ever. */
async function follow() {
  for (;;) {
    try {
      let first = true;
      for await (const { name, data } of serverEvents(await send("/v1/live"))) {
        if (name === "away") showConnection("away", `The engine does not answer: ${data.message}`);
        if (name !== "live") continue;
        if (first) timeline.forget(); // the first event tells of the last half minute again
        first = false;
        timeline.add(data);
        const workers = timeline.rows.size;
        showConnection("live", `Live · ${workers} ${workers === 1 ? "worker" : "workers"}`);
      }
      showConnection("away", "The server ended the connection; trying again …");
    } catch (error) {
      const told = error instanceof ApiError ? error.message : "The server can't be reached";
      showConnection("away", `${told}; trying again …`);
    }
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
  }
}

/** Ask for the models until every one of them is loaded. */
async function loadModels() {
  for (;;) {
    try {
      const models = (await getJson("/v1/models")).data;
      const adapters = (await getJson("/v1/loras")).data;
      form.offer(models, adapters);
      if (models.every((model) => model.pipeline !== null)) return;
    } catch (error) {
      showConnection("away", error instanceof ApiError ? error.message : "The server can't be reached");
    }
    await new Promise((resolve) => setTimeout(resolve, LOADING_MS));
  }
}

const theme = {
  names: ["auto", "dark", "light"],

  set(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    byId("theme").textContent = `Theme: ${name}`;
    localStorage.setItem("omni-engine-theme", name);
    colours.changed();
  },

  next() {
    const now = localStorage.getItem("omni-engine-theme") || "auto";
    this.set(this.names[(this.names.indexOf(now) + 1) % this.names.length]);
  },
};

theme.set(localStorage.getItem("omni-engine-theme") || "auto");
byId("theme").addEventListener("click", () => theme.next());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.changed());
byId("clear").addEventListener("click", () => gallery.clear());
byId("pause").addEventListener("click", () => {
  const paused = !canvas.paused;
  canvas.pause(paused);
  byId("pause").setAttribute("aria-pressed", String(paused));
});
byId("prompt").placeholder = "a small purple diamond on a cyan background";
setInterval(showFigures, 200);
setInterval(describeTimeline, 5000);
loadModels();
follow();
