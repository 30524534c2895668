// The form: what a model takes, and what is asked of it.

const FIELD_OF_PARAM = {
  model: "model", prompt: "prompt", size: "width", width: "width", height: "height",
  num_inference_steps: "steps", seed: "seed", n: "n", num_frames: "frames", lora: "adapter",
  "lora.name": "adapter", "lora.scale": "scale", negative_prompt: "negative",
  guidance_scale: "guidance", true_cfg_scale: "guidance",
};

class DrawForm {
  constructor(onDraw) {
    this.models = [];
    this.adapters = [];
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.draw(onDraw);
    });
    byId("form").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.draw(onDraw);
    });
    byId("form").addEventListener("input", (event) => this.clearError(event.target));
    byId("model").addEventListener("change", () => this.showModel());
    byId("adapter").addEventListener("change", () => this.showScale());
    byId("scale").addEventListener("input", () => {
      byId("scale-shown").textContent = byId("scale").value;
    });
  }

  /** Offer models as /v1/models lists them, and adapters as /v1/loras does. */
  offer(models, adapters) {
    const chosen = byId("model").value;
    this.models = models;
    this.adapters = adapters.filter((adapter) => adapter.state !== "broken");
    byId("model").replaceChildren(...models.map((model) => make("option", { value: model.id }, model.id)));
    if (models.some((model) => model.id === chosen)) byId("model").value = chosen;
    byId("model-field").hidden = models.length < 2;
    orderAdapters(this.adapters.map((adapter) => adapter.name));
    this.showModel();
  }

  get model() {
    return this.models.find((model) => model.id === byId("model").value) || this.models[0];
  }

  showModel() {
    const { model } = this;
    if (!model) return;
    const defaults = model.defaults || {};
    const video = model.makes === "video";
    for (const [id, field] of [
      ["width", "width"], ["height", "height"], ["steps", "num_inference_steps"],
      ["frames", "num_frames"], ["guidance", guidanceField(model)],
    ]) {
      byId(id).placeholder = defaults[field] ?? "default";
    }
    for (const id of ["width", "height"]) byId(id).step = model.size_multiple || 1;
    byId("negative").placeholder = (defaults.negative_prompt || "").trim();
    byId("frames-field").hidden = !video;
    byId("n-field").hidden = video;
    byId("draw").textContent = video ? "Make the video" : "Draw";
    this.showNote(model, video);
    this.showAdapters(model);
  }

  showNote(model, video) {
    const needed = (model.required_inputs || []).join(", ");
    byId("draw").disabled = Boolean(needed);
    const notes = [];
    if (video) notes.push(`${model.id} makes videos. They come when they are complete.`);
    if (needed) notes.push(`${model.id} also needs: ${needed}. Use the API for it.`);
    if (model.makes_previews === false && !video) {
      notes.push(`${model.id} makes no previews: pictures come when they are finished.`);
    }
    byId("model-note").hidden = !notes.length;
    byId("model-note").textContent = notes.join(" ");
  }

  showAdapters(model) {
    const chosen = byId("adapter").value;
    const names = this.adapters.filter((adapter) => adapter.model === model.id).map((adapter) => adapter.name);
    const options = names.map((name) => make("option", { value: name }, name));
    byId("adapter").replaceChildren(make("option", { value: "" }, "None"), ...options);
    if (names.includes(chosen)) byId("adapter").value = chosen;
    byId("adapter-field").hidden = !names.length;
    this.showScale();
  }

  showScale() {
    byId("scale-field").hidden = !byId("adapter").value;
    const adapter = this.adapters.find(
      (known) => known.name === byId("adapter").value && known.model === this.model.id,
    );
    if (!adapter || this.scaleOf === adapter.name) return;
    this.scaleOf = adapter.name;
    byId("scale").value = adapter.default_scale ?? 1;
    byId("scale-shown").textContent = byId("scale").value;
  }

  draw(onDraw) {
    const model = this.model || {}; // not told yet: the server's first one
    const prompt = byId("prompt").value.trim();
    if (!prompt) {
      this.showError("prompt", "Say what to draw.");
      return;
    }
    for (const input of byId("form").querySelectorAll("input[type=number]")) {
      if (input.validity.badInput) {
        this.showError(input.id, "That is not a number.");
        return;
      }
    }
    this.showError(null);
    onDraw(this.request(model, prompt), model);
  }

  /** What is sent; what is left empty is the server's to choose. */
  request(model, prompt) {
    const video = model.makes === "video";
    const defaults = model.defaults || {};
    const chosen = byId("width").value || byId("height").value;
    const width = byId("width").value || defaults.width;
    const height = byId("height").value || defaults.height;
    const adapter = byId("adapter").value;
    const request = {
      model: model.id,
      prompt,
      size: chosen && width && height ? `${width}x${height}` : undefined,
      num_inference_steps: numberIn("steps"),
      seed: numberIn("seed"),
      n: video ? undefined : numberIn("n"),
      num_frames: video ? numberIn("frames") : undefined,
      lora: adapter ? { name: adapter, scale: Number(byId("scale").value) } : undefined,
      negative_prompt: byId("negative").value || undefined,
      [guidanceField(model)]: numberIn("guidance"),
    };
    return Object.fromEntries(Object.entries(request).filter(([, value]) => value !== undefined));
  }

  /** Mark a field, tell what is wrong with it and go there; null: nothing is wrong. */
  showError(id, message = "") {
    for (const input of byId("form").querySelectorAll("[aria-invalid]")) this.clearError(input);
    byId("form-error").hidden = !message;
    byId("form-error").textContent = message;
    if (!id) return;
    const input = byId(id);
    input.closest("details")?.setAttribute("open", "");
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-errormessage", "form-error");
    input.focus();
  }

  /** Go to the field that the server refused. */
  refused(error) {
    const id = FIELD_OF_PARAM[error.param];
    if (id) this.showError(id, error.message);
  }

  clearError(input) {
    if (!input.hasAttribute("aria-invalid")) return;
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-errormessage");
    byId("form-error").hidden = true;
  }
}

function numberIn(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

/** The field that a model's guidance is: some take it as true classifier-free guidance. */
function guidanceField(model) {
  const defaults = model.defaults || {};
  return (defaults.true_cfg_scale ?? null) !== null ? "true_cfg_scale" : "guidance_scale";
}
