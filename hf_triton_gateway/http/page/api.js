// SPDX-License-Identifier: Apache-2.0
// Talks to the gateway: requests, its errors, server-sent events. Knows neither the document nor the conversation.

const ROOT = new URL("../", import.meta.url);
const MAX_ARGUMENT = 30_000; // characters: Linux takes 128 KiB

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

/** The models: of each its `id`, its `task`, and what else the gateway tells. */
export async function listModels(key) {
  const models = (await (await call("v1/models", key)).json()).data;
  return models.map((model) => ({ task: "text-generation", ...model })); // one that was never loaded tells no task
}

/** POST a body; the answer. */
export async function post({ path, body }, key, signal) {
  return (await call(path, key, { method: "POST", body, signal })).json();
}

/** POST a body and yield the stream's chunks. */
export async function* stream({ path, body }, key, signal) {
  const response = await call(path, key, { method: "POST", body, signal });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status, chunk.error.code);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.", response.status);
}

/** The shell command that sends a request; the key stays in the reader's environment. */
export function curlCommand({ path, body }, hasKey) {
  const headers = ["Content-Type: application/json"].map(quote);
  if (hasKey) headers.push('"Authorization: Bearer $OPENAI_API_KEY"');
  const command = ["curl -N", quote(new URL(path, ROOT).href), ...headers.map((header) => `-H ${header}`)].join(" ");
  if (body.length < MAX_ARGUMENT) return `${command} -d ${quote(body)}`;
  return `${command} -d @- <<'END'\n${body}\nEND\n`; // JSON has no newline
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

async function call(path, key, options = {}) {
  const headers = new Headers(options.body ? { "Content-Type": "application/json" } : {});
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The gateway cannot be reached.", 0);
  }
  if (!response.ok) throw await readError(response);
  return response;
}

async function readError(response) {
  const text = await response.text();
  let error = { message: `The gateway answers ${response.status}: ${text.slice(0, 300)}` };
  try {
    error = JSON.parse(text).error ?? error;
  } catch {} // a proxy's page
  return new ApiError(error.message, response.status, error.code);
}

/** Yield the data of each event. A line ends with a newline; what is no `data:` line carries nothing here. */
async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.filter((line) => line.startsWith("data:")).map((line) => line.slice("data:".length).trim());
  }
}
