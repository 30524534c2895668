// Talking to the server: the key, errors, server-sent events.

const KEY_NAME = "omni-engine-key";

class ApiError extends Error {
  /** An error in OpenAI's shape: `param` is the field at fault, or null. */
  constructor(status, body) {
    const told = (body && body.error) || {};
    super(told.message || `The server answered ${status}.`);
    this.status = status;
    this.param = told.param || null;
    this.code = told.code || null;
  }
}

const keyPrompt = {
  waiting: null,

  /** Show the dialog, once however many ask; resolves when a key was given. */
  ask(message) {
    if (this.waiting) return this.waiting;
    const dialog = byId("key-dialog");
    byId("key-note").textContent = message;
    this.waiting = new Promise((resolve) => {
      byId("key-form").onsubmit = (event) => {
        event.preventDefault();
        sessionStorage.setItem(KEY_NAME, byId("key").value.trim());
        byId("key").value = "";
        this.waiting = null;
        dialog.close();
        resolve();
      };
    });
    dialog.oncancel = (event) => event.preventDefault();
    dialog.showModal();
    return this.waiting;
  },
};

function byId(id) {
  return document.getElementById(id);
}

/** Make an element; text and attributes are set as such, never parsed as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Send a request; asks for a key and repeats it where one is needed. Throws ApiError. */
async function send(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    const key = sessionStorage.getItem(KEY_NAME);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (options.body !== undefined) headers["Content-Type"] = "application/json";
    const body = options.body === undefined ? undefined : JSON.stringify(options.body);
    const response = await fetch(path, { ...options, headers, body }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server can't be reached.");
    });
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    if (response.status !== 401) throw new ApiError(response.status, told);
    if (key === sessionStorage.getItem(KEY_NAME)) {
      await keyPrompt.ask(
        key ? "That was not the right key." : "It is kept in this tab until you close it.",
      );
    }
  }
}

async function getJson(path) {
  return (await send(path)).json();
}

/** Yield a response's server-sent events as {name, data}. */
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Error("The connection to the server broke.");
      });
      if (done) return;
      parts.push(value);
      if (!value.includes("\n")) continue;
      const blocks = parts.join("").replaceAll("\r\n", "\n").split("\n\n");
      parts = [blocks.pop()];
      for (const block of blocks) {
        const event = parsedEvent(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsedEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (!data.length || data[0] === "[DONE]") return null;
  return { name, data: JSON.parse(data.join("\n")) };
}

/** Browsers open six connections to a server; the live feed holds one of them. */
const streams = {
  free: 5,
  waiting: [],

  async take(signal) {
    if (this.free > 0) {
      this.free -= 1;
      return;
    }
    await new Promise((resolve, reject) => {
      const turn = { resolve };
      this.waiting.push(turn);
      signal.addEventListener("abort", () => {
        const place = this.waiting.indexOf(turn);
        if (place < 0) return;
        this.waiting.splice(place, 1);
        reject(new DOMException("cancelled", "AbortError"));
      });
    });
  },

  give() {
    const next = this.waiting.shift();
    if (next) next.resolve();
    else this.free += 1;
  },
};

function blobOf(base64, type) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type });
}

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

let lastSaid = "";

/** Tell screen readers what happened. */
function say(text) {
  lastSaid = text === lastSaid ? text + "\u00a0" : text;
  byId("said").textContent = lastSaid;
}
