// SPDX-License-Identifier: Apache-2.0
// What was asked and answered, and the request that asks next. Knows neither the document nor the network.

const OF_THE_PAGE = ["model", "messages", "prompt", "stream", "stream_options", "n"];
const MAX_TOOL_CALLS = 1000; // of an answer; later ones are left out
const INDEX = Symbol("index"); // of a tool call in its stream: neither sent nor kept

/** Chunks of a shorter stream may have waited for one read; their times tell no rate. */
const MIN_STREAMED_MS = 50;

/** A prompt and its answer, as far as it has come. Times are milliseconds since the page was opened. */
export function newTurn(prompt, settings, images = []) {
  const state = { isRunning: true, wasStopped: false, error: null, usage: null, finishReason: null };
  const times = { startMs: performance.now(), firstMs: null, lastMs: null };
  return { prompt, images, settings, content: "", reasoning: "", toolCalls: [], ...state, ...times };
}

/** The path and the body that ask for a turn's answer, after the turns before it. */
export function buildRequest(turns, turn) {
  const { settings } = turn;
  const before = history(turns.slice(0, turns.indexOf(turn)), settings.system);
  const [path, input] =
    settings.mode === "chat"
      ? ["v1/chat/completions", { messages: [...before, userMessage(turn)] }]
      : ["v1/completions", { prompt: turn.prompt }];
  const streaming = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  return { path, body: JSON.stringify({ model: settings.model, ...input, ...settings.parameters, ...streaming }) };
}

/** Why text cannot be the other fields of a request; empty if it can. */
export function otherFieldsProblem(text) {
  try {
    const fields = JSON.parse(text || "{}");
    if (Object.prototype.toString.call(fields) !== "[object Object]") return 'Write an object, such as {"top_k": 40}.';
    const taken = OF_THE_PAGE.find((name) => name in fields);
    return taken ? `The page sends ${taken} itself, and shows one answer: leave it out.` : "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

/** Add a chunk of the stream to its turn. */
export function addChunk(turn, chunk) {
  if (chunk.usage) turn.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? { content: choice.text };
  turn.content += content ?? "";
  turn.reasoning += reasoning ?? "";
  for (const call of calls ?? []) addToolCall(turn.toolCalls, call);
  if (choice.finish_reason) turn.finishReason = choice.finish_reason;
  if (content || reasoning || calls?.length) {
    turn.lastMs = performance.now();
    turn.firstMs ??= turn.lastMs;
  }
}

/** A number as people write it, of three significant digits or all before the point: 0.042, 1,140. */
export function figure(number) {
  return number.toLocaleString("en-US", number < 100 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
}

/** The figures of an answer in words: tokens, their rate, the time to the first one, how it ended. */
export function describe(turn) {
  const { completion_tokens: tokens } = counts(turn);
  const figures = [];
  if (tokens !== undefined) figures.push(`${figure(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
  if (tokens > 0 && turn.firstMs !== null) figures.push(`${figure(tokensPerSecond(turn, tokens))} tokens/s`);
  if (turn.firstMs !== null) figures.push(`first token after ${((turn.firstMs - turn.startMs) / 1000).toFixed(2)} s`);
  if (turn.wasStopped) figures.push("stopped");
  else if (turn.finishReason === "length") figures.push("cut at max_tokens");
  else if (turn.finishReason && turn.finishReason !== "stop") figures.push(`ended by ${turn.finishReason}`);
  return figures.join(" · ");
}

/** Tokens of the model's context that a conversation takes, by its last answer; 0 if none says. */
export function contextUsed(turns) {
  const { prompt_tokens: prompt = 0, completion_tokens: completion = 0 } = counts(turns.findLast(({ usage }) => usage));
  return prompt + completion;
}

/** The numbers of a turn's usage: a server may send anything. */
function counts(turn) {
  return Object.fromEntries(Object.entries(turn?.usage ?? {}).filter(([, value]) => Number.isFinite(value)));
}

/** After an error about the context: the `max_tokens` that would fit, 0 if none does; undefined after other errors. */
export function roomLeft({ error }) {
  if (error?.code !== "context_length_exceeded") return undefined;
  return Number(/max_tokens <= (\d+)/.exec(error.message)?.[1] ?? 0);
}

/** After the first token; over the whole answer if it came in one piece, or in pieces that arrived together. */
function tokensPerSecond(turn, tokens) {
  const streamedMs = turn.lastMs - turn.firstMs;
  if (streamedMs >= MIN_STREAMED_MS && tokens > 1) return ((tokens - 1) * 1000) / streamedMs;
  return (tokens * 1000) / (turn.lastMs - turn.startMs);
}

/** The turns that later ones are asked after. */
export function answered(turns) {
  return turns.filter((turn) => turn.settings.mode === "chat" && (turn.content || turn.toolCalls.length));
}

function history(turns, system) {
  const messages = answered(turns).flatMap((turn) => [userMessage(turn), assistantMessage(turn)]);
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** A prompt behind its images, without those that were not kept. */
function userMessage({ prompt, images }) {
  const parts = images.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (prompt.trim()) parts.push({ type: "text", text: prompt });
  return { role: "user", content: parts.some(({ type }) => type !== "text") ? parts : prompt };
}

function assistantMessage(turn) {
  const message = { role: "assistant", content: turn.content || null };
  return turn.toolCalls.length ? { ...message, tool_calls: turn.toolCalls } : message;
}

function addToolCall(calls, { index, id, type, function: called }) {
  const fresh = { id, type: type ?? "function", function: { name: "", arguments: "" }, [INDEX]: index };
  const call = calls.find((other) => other[INDEX] === index) ?? fresh;
  if (call === fresh && calls.length < MAX_TOOL_CALLS) calls.push(call);
  call.function.name += called?.name ?? "";
  call.function.arguments += called?.arguments ?? "";
}
