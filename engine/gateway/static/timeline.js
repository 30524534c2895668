// What the live feed told: boxes by worker, the queue, figures, the engine's clock.

const WINDOW_S = 20;
const KEPT_S = 40;
const RATE_S = 10;

const adapterOrder = new Map();

/** The colour of an adapter, the same everywhere on the page; no name is the neutral one. */
function adapterColour(name) {
  return `var(--series-${adapterSeries(name)})`;
}

function adapterSeries(name) {
  if (name === null) return 0;
  if (!adapterOrder.has(name)) adapterOrder.set(name, (adapterOrder.size % 8) + 1);
  return adapterOrder.get(name);
}

/** Give the adapters that a server offers the first colours, in its order. */
function orderAdapters(names) {
  const others = [...adapterOrder.keys()];
  adapterOrder.clear();
  for (const name of [...names, ...others]) adapterSeries(name);
}

class Timeline {
  constructor() {
    this.rows = new Map();
    this.queue = [];
    this.outputs = [];
    this.own = new Set();
    this.running = [];
    this.boxCount = 0;
    this.ownCount = 0;
    this.offset = null;
    this.waiting = null;
    this.runningCount = null;
  }

  /** The engine's time now, in its seconds; null before the first event. */
  now() {
    return this.offset === null ? null : performance.now() / 1000 + this.offset;
  }

  /** Take an event of the live feed in. */
  add(event) {
    const offset = event.now_s - performance.now() / 1000;
    const jumped = this.offset !== null && Math.abs(offset - this.offset) > 5;
    if (jumped) this.forget();
    // Delays on the way only ever make an event late, so the least late one is right.
    this.offset = this.offset === null || jumped ? offset : Math.max(offset, this.offset - 0.002);
    this.readStages(event);
    for (const box of event.boxes) this.row(box).boxes.push(box);
    this.boxCount += event.boxes.length;
    this.ownCount += event.boxes.filter((box) => this.isOwn(box)).length;
    this.running = event.running;
    this.prune(event.now_s - KEPT_S);
  }

  readStages(event) {
    const total = (name) => event.stages.reduce((sum, stage) => sum + stage[name], 0);
    this.waiting = total("waiting");
    this.runningCount = total("running");
    this.queue.push({ at: event.now_s, waiting: this.waiting });
    this.outputs.push({ at: event.now_s, count: total("outputs") });
    const seen = new Set();
    for (const stage of event.stages) {
      for (const worker of stage.workers) {
        const row = this.row({ stage: stage.name, worker_id: worker.worker_id });
        row.state = worker.state;
        seen.add(row);
      }
    }
    for (const [key, row] of this.rows) {
      if (!seen.has(row) && !row.boxes.length) this.rows.delete(key);
    }
  }

  row({ stage, worker_id }) {
    const key = `${stage}\n${worker_id}`;
    if (!this.rows.has(key)) this.rows.set(key, { stage, worker_id, state: "", boxes: [] });
    return this.rows.get(key);
  }

  prune(horizon) {
    for (const row of this.rows.values()) {
      let gone = 0;
      while (gone < row.boxes.length && row.boxes[gone].end_s < horizon) gone += 1;
      if (gone) row.boxes.splice(0, gone);
    }
    for (const samples of [this.queue, this.outputs]) {
      while (samples.length > 1 && samples[1].at < horizon) samples.shift();
    }
  }

  forget() {
    for (const row of this.rows.values()) row.boxes = [];
    this.queue = [];
    this.outputs = [];
    this.offset = null;
  }

  isOwn(box) {
    return box.request_ids.some((id) => this.own.has(id));
  }

  /** Pictures a second over the last ten; null before there is anything to compare. */
  rate() {
    const now = this.now();
    if (now === null || !this.outputs.length) return null;
    const before = this.outputs.findLast((sample) => sample.at <= now - RATE_S);
    const base = before || this.outputs[0];
    const last = this.outputs[this.outputs.length - 1];
    const span = before ? RATE_S : Math.max(1, now - base.at);
    return (last.count - base.count) / span;
  }

  /** Requests per box, on average over what is shown; null without boxes. */
  meanBatch() {
    const horizon = (this.now() ?? 0) - WINDOW_S;
    let boxes = 0;
    let requests = 0;
    for (const row of this.rows.values()) {
      for (const box of row.boxes) {
        if (box.end_s < horizon) continue;
        boxes += 1;
        requests += box.requests;
      }
    }
    return boxes ? requests / boxes : null;
  }

  /** The adapters in sight, null for none, in the order of their colours. */
  adapters() {
    const names = new Set();
    for (const row of this.rows.values()) {
      for (const box of row.boxes) {
        if (!box.adapters.length) names.add(null);
        for (const adapter of box.adapters) names.add(adapter.name);
      }
    }
    return [...names].sort((one, other) => adapterSeries(one) - adapterSeries(other));
  }
}

function describeBox(box) {
  const adapters = box.adapters.map((adapter) => `${adapter.name} × ${+adapter.scale.toFixed(3)}`);
  const took = box.end_s === null ? "still runs" : `${Math.round((box.end_s - box.start_s) * 1000)} ms`;
  const requests = box.requests === 1 ? "1 request" : `${box.requests} requests`;
  const named = adapters.length ? `Adapter ${adapters.join(", ")}` : "No adapter";
  return `${box.kind === "tick" ? "Tick" : "Batch"} of ${requests}, ${took}\n${named}\n${box.worker_id}`;
}
