// One picture or video from the server, with progress on the way.

const POLL_MS = 700;

/**
 * Draw pictures; `tell` gets {kind: "progress" | "partial" | "picture", ...} as they come.
 * The stream's end by `signal` aborts the request in the engine.
 */
async function drawPictures(request, id, signal, tell) {
  await streams.take(signal);
  try {
    tell({ kind: "sent" });
    const response = await send("/v1/images/generations", {
      method: "POST",
      signal,
      headers: { "X-Request-Id": id },
      body: {
        ...request,
        stream: true,
        partial_images: 3,
        stream_options: { include_progress: true },
      },
    });
    let pictures = 0;
    for await (const { name, data } of serverEvents(response)) {
      if (name === "error") throw new ApiError(response.status, data);
      if (name.endsWith(".progress")) tell({ kind: "progress", ...data });
      if (name.endsWith(".partial_image")) tell({ kind: "partial", url: pictureUrl(data) });
      if (name.endsWith(".completed")) {
        pictures += 1;
        tell({ kind: "picture", url: pictureUrl(data), ...data });
      }
    }
    if (!pictures) throw new Error("The server ended the stream before the picture was there.");
  } finally {
    streams.give();
  }
}

function pictureUrl(data) {
  return URL.createObjectURL(blobOf(data.b64_json, `image/${data.output_format || "png"}`));
}

/** Draw a video: a job that is asked for its progress until it is there. */
async function drawVideo(request, id, signal, tell) {
  tell({ kind: "sent" });
  const headers = { "X-Request-Id": id };
  const sent = await send("/v1/videos", { method: "POST", headers, signal, body: request });
  let job = await sent.json();
  const place = `/v1/videos/${encodeURIComponent(job.id)}`;
  try {
    while (job.status === "queued" || job.status === "in_progress") {
      const status = job.status === "queued" ? "waiting" : "running";
      tell({ kind: "progress", status, percent: job.progress || 0 });
      await pause(POLL_MS, signal);
      job = await (await send(place, { signal })).json();
    }
    if (job.status !== "completed") throw new ApiError(500, { error: job.error });
    const content = await (await send(`${place}/content`, { signal })).blob();
    tell({ ...job, kind: "picture", url: URL.createObjectURL(content), request_id: job.id });
  } catch (error) {
    if (signal.aborted) await send(place, { method: "DELETE" }).catch(() => {});
    throw error;
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("cancelled", "AbortError"));
    });
  });
}
