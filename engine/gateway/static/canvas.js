// Draws the timeline: the queue above, one row a worker, one box a tick or batch.

const GUTTER = 34;
const QUEUE_HEIGHT = 40;
const LABEL_HEIGHT = 22;
const BETWEEN = 10;
const AXIS_HEIGHT = 20;
const LAG_S = 0.35;
const FRAME_MS = 33;

class TimelineCanvas {
  constructor(canvas, tip, said, timeline) {
    this.canvas = canvas;
    this.tip = tip;
    this.said = said;
    this.timeline = timeline;
    this.frozenAt = null;
    this.paused = false;
    this.selected = null;
    this.pointer = null;
    this.drawn = [];
    this.drawnAt = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    canvas.addEventListener("pointerleave", () => this.onPointerGone());
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("blur", () => this.select(null));
    requestAnimationFrame((at) => this.frame(at));
  }

  /** Stop the timeline where it is, or let it run. */
  pause(paused) {
    this.paused = paused;
    this.freeze();
  }

  freeze() {
    const still = this.paused || this.selected !== null;
    if (!still) this.frozenAt = null;
    else if (this.frozenAt === null) this.frozenAt = this.timeline.now();
  }

  frame(at) {
    requestAnimationFrame((next) => this.frame(next));
    const busy = this.timeline.running.length || this.drawn.length;
    const pause = this.calm.matches ? 1000 : busy ? FRAME_MS : 500;
    if (at - this.drawnAt < pause - 4) return;
    this.drawnAt = at;
    this.draw();
  }

  draw() {
    const rows = [...this.timeline.rows.values()];
    const barHeight = [80, 80, 60, 44, 44][rows.length] ?? 26;
    const rowHeight = LABEL_HEIGHT + barHeight + BETWEEN;
    const firstRow = LABEL_HEIGHT + QUEUE_HEIGHT + BETWEEN;
    const height = firstRow + Math.max(1, rows.length) * rowHeight - BETWEEN + AXIS_HEIGHT;
    this.fit(height);
    const now = this.frozenAt ?? this.timeline.now();
    const pen = this.pen;
    pen.clearRect(0, 0, this.width, height);
    this.drawn = [];
    if (now === null) return;
    this.end = now - LAG_S;
    const most = this.mostRequests(rows);
    this.drawQueue(LABEL_HEIGHT);
    rows.forEach((row, place) => {
      this.drawRow(row, place, firstRow + place * rowHeight + LABEL_HEIGHT, barHeight, most);
    });
    this.drawAxis(height - AXIS_HEIGHT);
    this.showTip();
  }

  fit(height) {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    if (width !== this.width || height !== this.height || ratio !== this.ratio) {
      Object.assign(this, { width, height, ratio });
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.pen = this.canvas.getContext("2d");
      this.pen.scale(ratio, ratio);
    }
    this.pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    this.pen.textBaseline = "middle";
  }

  x(at) {
    return GUTTER + (this.width - GUTTER) * (1 - (this.end - at) / WINDOW_S);
  }

  mostRequests(rows) {
    let most = 4;
    for (const box of [...rows.flatMap((row) => row.boxes), ...this.timeline.running]) {
      if ((box.end_s ?? this.end) > this.end - WINDOW_S) most = Math.max(most, box.requests);
    }
    return most <= 4 ? 4 : 2 ** Math.ceil(Math.log2(most));
  }

  text(text, x, y, align = "left", colour = "--soft") {
    this.pen.fillStyle = colours.get(colour);
    this.pen.textAlign = align;
    this.pen.fillText(text, x, y);
  }

  line(x0, y0, x1, y1, colour = "--line") {
    this.pen.strokeStyle = colours.get(colour);
    this.pen.lineWidth = 1;
    this.pen.beginPath();
    this.pen.moveTo(x0, Math.round(y0) + 0.5);
    this.pen.lineTo(x1, Math.round(y1) + 0.5);
    this.pen.stroke();
  }

  drawQueue(top) {
    const height = QUEUE_HEIGHT;
    const bottom = top + height;
    const samples = this.timeline.queue;
    const shown = samples.filter((_, place) => samples[place + 1]?.at > this.end - WINDOW_S);
    const most = Math.max(4, samples.at(-1)?.waiting ?? 0, ...shown.map(({ waiting }) => waiting));
    this.text("Requests waiting", GUTTER, top - 10);
    this.text(String(most), GUTTER - 6, top + 4, "right");
    this.text("0", GUTTER - 6, bottom - 2, "right");
    this.line(GUTTER, bottom, this.width, bottom);
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(GUTTER, top - 2, this.width - GUTTER, height + 4);
    this.pen.clip();
    this.pen.beginPath();
    let y = bottom + 2;
    this.pen.moveTo(Math.max(GUTTER - 2, this.x(samples[0]?.at ?? this.end)), y);
    for (const { at, waiting } of samples) {
      const x = Math.max(GUTTER - 2, this.x(at));
      this.pen.lineTo(x, y);
      y = bottom - (height * waiting) / most;
      this.pen.lineTo(x, y);
    }
    this.pen.lineTo(this.width + 2, y);
    this.pen.lineTo(this.width + 2, bottom + 2);
    this.pen.strokeStyle = this.pen.fillStyle = colours.get("--accent");
    this.pen.globalAlpha = 0.16;
    this.pen.fill();
    this.pen.globalAlpha = 1;
    this.pen.lineWidth = 1.5;
    this.pen.stroke();
    this.pen.restore();
  }

  drawRow(row, place, top, height, most) {
    const bottom = top + height;
    const state = ["idle", "busy"].includes(row.state) ? "" : ` (${row.state})`;
    this.text(`${row.stage} · ${row.worker_id}${state}`, GUTTER, top - 10);
    this.text(String(most), GUTTER - 6, top + 4, "right");
    if (height >= 40) {
      this.text(String(most / 2), GUTTER - 6, top + height / 2, "right");
      this.line(GUTTER, top + height / 2, this.width, top + height / 2);
    }
    this.line(GUTTER, top, this.width, top);
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(GUTTER, top - 2, this.width - GUTTER, height + 4);
    this.pen.clip();
    const open = this.timeline.running.filter(
      (box) => box.stage === row.stage && box.worker_id === row.worker_id,
    );
    const rightOf = new Map();
    for (const box of [...row.boxes, ...open]) {
      const left = this.x(box.start_s);
      const right = this.x(box.end_s ?? this.end + LAG_S);
      if (right < GUTTER || left > this.width) continue;
      const full = Math.max(2, (height * box.requests) / most);
      const shape = { box, place, left, right: Math.max(right, left + 1), top: bottom - full, bottom };
      this.drawn.push(shape);
      // Boxes thinner than a pixel hide each other: one of a kind is enough.
      const look = `${box.requests} ${box.adapters.map((adapter) => adapter.name)}`;
      if (right - (rightOf.get(look) ?? -1) < 0.5) continue;
      rightOf.set(look, right);
      this.drawBox(shape);
    }
    this.pen.restore();
    this.line(GUTTER, bottom, this.width, bottom, "--strong-line");
  }

  drawBox({ box, left, right, top, bottom }) {
    const wide = right - left > 4;
    const width = right - left - (wide ? 1 : 0);
    const names = box.adapters.length ? box.adapters.map((adapter) => adapter.name) : [null];
    const part = (bottom - top) / names.length;
    names.forEach((name, place) => {
      this.pen.fillStyle = colours.get(`--series-${adapterSeries(name)}`);
      this.pen.globalAlpha = box.end_s === null ? 0.7 : 1;
      this.pen.fillRect(left, top + place * part, width, part);
    });
    this.pen.globalAlpha = 1;
    if (!this.timeline.isOwn(box)) return;
    this.pen.fillStyle = this.pen.strokeStyle = colours.get("--text");
    this.pen.lineWidth = 1;
    if (width > 8) this.pen.strokeRect(left + 0.5, top + 0.5, width - 1, bottom - top - 1);
    else this.pen.fillRect(left, top - 1, right - left, 1.5);
  }

  drawAxis(top) {
    const step = this.width < 500 ? 10 : 5;
    for (let ago = WINDOW_S - step; ago > 0; ago -= step) {
      this.text(`${ago} s ago`, this.x(this.end - ago), top + 11, "center");
    }
    this.text(this.frozenAt === null ? "now" : "stopped", this.width - 2, top + 11, "right");
  }

  onPointer(event) {
    const place = this.canvas.getBoundingClientRect();
    this.pointer = { x: event.clientX - place.left, y: event.clientY - place.top };
    this.showTip();
  }

  onPointerGone() {
    this.pointer = null;
    this.showTip();
  }

  pointed() {
    if (!this.pointer) return null;
    const { x, y } = this.pointer;
    const near = (shape) => x >= shape.left - 3 && x <= shape.right + 3;
    const distance = (shape) => Math.abs((shape.left + shape.right) / 2 - x);
    return this.drawn
      .filter((shape) => near(shape) && y >= shape.top - 6 && y <= shape.bottom + 4)
      .reduce((best, shape) => (!best || distance(shape) < distance(best) ? shape : best), null);
  }

  showTip() {
    const chosen = this.drawn.find((shape) => shape.box === this.selected) || this.pointed();
    this.tip.hidden = !chosen;
    if (!chosen) return;
    const own = this.timeline.isOwn(chosen.box) ? "\nYours" : "";
    this.tip.textContent = describeBox(chosen.box) + own;
    const middle = (Math.max(GUTTER, chosen.left) + Math.min(this.width, chosen.right)) / 2;
    const room = this.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, middle - this.tip.offsetWidth / 2))}px`;
    this.tip.style.top = `${chosen.bottom + 6}px`;
    if (chosen.box === this.selected) this.outline(chosen);
  }

  outline({ left, right, top, bottom }) {
    this.pen.strokeStyle = colours.get("--accent");
    this.pen.lineWidth = 2;
    this.pen.strokeRect(left - 2, top - 2, right - left + 4, bottom - top + 4);
  }

  onKey(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") this.select(null);
    else if (moves[event.key] && this.drawn.length) {
      event.preventDefault();
      this.select(this.neighbour(...moves[event.key]));
    }
  }

  neighbour(along, across) {
    const shown = this.drawn.filter((shape) => shape.right > GUTTER && shape.left < this.width);
    const now = shown.find((shape) => shape.box === this.selected);
    if (!now) return shown.length ? shown[shown.length - 1].box : null;
    const places = [...new Set(shown.map((shape) => shape.place))].sort((one, other) => one - other);
    const wanted = places[places.indexOf(now.place) + across] ?? now.place;
    const row = shown.filter((shape) => shape.place === wanted);
    if (!across || wanted === now.place) {
      return (row[row.indexOf(now) + along] || now).box;
    }
    const distance = (shape) => Math.abs(shape.left - now.left);
    return row.reduce((best, shape) => (distance(shape) < distance(best) ? shape : best)).box;
  }

  select(box) {
    this.selected = box;
    this.said.textContent = box === null ? "" : describeBox(box).replaceAll("\n", ". ");
    this.freeze();
    this.draw();
  }
}

/** Colours of the present theme, as canvas takes them. */
const colours = {
  known: new Map(),
  probe: null,

  get(name) {
    if (!this.known.has(name)) {
      this.probe ||= document.body.appendChild(make("span", { class: "unseen", "aria-hidden": "true" }));
      this.probe.style.color = `var(${name})`;
      this.known.set(name, getComputedStyle(this.probe).color);
    }
    return this.known.get(name);
  },

  /** Forget them: the theme has changed. */
  changed() {
    this.known.clear();
  },
};
