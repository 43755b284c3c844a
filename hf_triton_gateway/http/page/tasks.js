// SPDX-License-Identifier: Apache-2.0
// Forms for encoders: what goes in, where it is asked, and how the answer is drawn. Knows no conversation.

import { curlCommand, post } from "./api.js";
import { figure } from "./conversation.js";
import { make } from "./inline.js";
import { announce, copy } from "./view.js";

const QUESTION = "How far is the harbour?";
const TEXTS = ["It is a mile away.", "Bread is baked in the morning.", "The port is near."].join("\n");
const PEOPLE = "Anna lives in Berlin and works for the Post.";
const MAX_COMPARED = 30; // texts: the table has a cell for each pair

let controller = new AbortController(); // of the answer that the form waits for

/** By task: its endpoint, what draws an answer, and the fields with label and example, whose `lines` may be texts each. */
const FORMS = {
  "text-classification": ["v1/classify", drawLabels, { name: "input", label: "Text", value: PEOPLE }],
  "token-classification": ["v1/token-classification", drawEntities, { name: "input", label: "Text", value: PEOPLE }],
  "fill-mask": ["v1/fill-mask", drawFills, { name: "input", label: "Text with [MASK]", value: "The sea is [MASK]." }],
  rerank: [
    "v1/rerank",
    drawRanks,
    { name: "query", label: "Query", value: QUESTION },
    { name: "documents", label: "Documents, one per line", value: TEXTS, lines: true },
  ],
  embeddings: [
    "v1/embeddings",
    drawSimilarities,
    { name: "input", label: "Texts, one per line", value: `${QUESTION}\n${TEXTS}`, lines: true },
  ],
};

/** Whether there is a form for a task. */
export const hasForm = (task) => task in FORMS;

/** Draw a model's form in an element; `key` tells the API key. */
export function showForm(element, model, key) {
  controller.abort();
  const [path, draw, ...fields] = FORMS[model.task];
  const masked = (words) => words.replaceAll("[MASK]", model.mask_token ?? "[MASK]");
  const labels = fields.map(({ name, label, value, lines }) =>
    make("label", "", masked(label), make("textarea", { name, value: masked(value), rows: lines ? 5 : 2, dir: "auto", required: true })),
  );
  element.querySelector(".fields").replaceChildren(...labels);
  element.querySelector(".result").replaceChildren();
  element.querySelector(".primary").disabled = false;
  element.onsubmit = (event) => {
    event.preventDefault();
    run(element, { path, draw, fields }, model, key());
  };
  element.onkeydown = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && element.requestSubmit();
}

async function run(element, { path, draw, fields }, model, key) {
  const [result, button] = [element.querySelector(".result"), element.querySelector(".primary")];
  const values = fields.map(({ name, lines }) => {
    const text = element.elements[name].value;
    return [name, lines ? text.split("\n").filter((line) => line.trim()) : text];
  });
  const body = { model: model.id, ...Object.fromEntries(values) };
  if (draw === drawEntities) body.aggregation_strategy = "simple";
  const request = () => ({ path, body: JSON.stringify(body) });
  const startMs = performance.now();
  controller.abort();
  const { signal } = (controller = new AbortController());
  button.disabled = true;
  try {
    let answer = await post(request(), key, signal);
    if (!(answer.data ?? answer.results)?.length) throw new Error("The server's answer is empty.");
    if (draw === drawLabels) {
      body.top_k = Math.min(answer.data[0].num_classes, 20); // the first answer tells how many labels there are
      answer = await post(request(), key, signal);
    }
    const tokens = answer.usage ? `${figure(answer.usage.total_tokens)} tokens · ` : "";
    const words = `${tokens}${figure(performance.now() - startMs)} ms`;
    const curl = make("button", { type: "button" }, "Copy as curl");
    curl.onclick = () => copy(curlCommand(request(), key !== null), curl);
    const foot = make("div", "foot", make("span", "figures", words), make("span", "actions", curl));
    result.replaceChildren(draw(answer, body), foot);
    announce(result.firstChild.innerText);
  } catch (error) {
    if (signal.aborted) return; // another answer, or another form, has taken its place
    result.replaceChildren(make("p", { className: "error", role: "alert" }, error.message));
  }
  button.disabled = false;
}

function drawLabels({ data: [{ labels }] }) {
  return bars(labels.map(({ label, score }) => [label, score]));
}

function drawFills({ data: [{ fills }] }) {
  const masks = Array.isArray(fills[0]) ? fills : [fills];
  return make("div", "", ...masks.map((tokens) => bars(tokens.map(({ token_str: token, score }) => [token, score]))));
}

function drawRanks({ results }) {
  return bars(results.map(({ document: { text }, relevance_score: score }) => [text, score]), (score) => score.toFixed(3));
}

/** A table of texts and scores. Scores outside 0 to 1 are drawn between the least and the greatest. */
function bars(rows, write = (score) => `${(100 * score).toFixed(1)} %`) {
  const scores = rows.map(([, score]) => score);
  const [least, most] = [Math.min(0, ...scores), Math.max(1, ...scores)];
  const lines = rows.map(([text, score]) => {
    const bar = make("div", "bar");
    bar.style.width = `${(100 * (score - least)) / (most - least)}%`;
    return make("tr", "", make("th", { scope: "row" }, text), make("td", "track", bar), make("td", "number", write(score)));
  });
  return make("table", "bars", ...lines);
}

/** The text with its entities marked. Places count code points; no letter is drawn twice. */
function drawEntities({ data: [{ entities }] }, { input }) {
  if (!entities.length) return make("p", "hint", "The model finds no entity in this text.");
  const letters = [...input];
  const text = make("p", "text");
  let at = 0;
  for (const { start, end, entity_group: label, score } of entities) {
    const mark = make("mark", { title: figure(score) }, letters.slice(Math.max(at, start), end).join(""), make("small", "", label));
    text.append(letters.slice(at, start).join(""), mark);
    at = Math.max(at, end);
  }
  text.append(letters.slice(at).join(""));
  return text;
}

function drawSimilarities({ data }, { input }) {
  const units = data.slice(0, MAX_COMPARED).map(({ embedding }) => unit(embedding));
  const row = (one, index) => {
    const cosines = units.map((other) => dot(one, other));
    const cells = cosines.map((cosine) => make("td", "", cosine.toFixed(2)));
    cosines.forEach((cosine, at) => cells[at].style.setProperty("--share", `${Math.max(0, 45 * cosine)}%`));
    return make("tr", "", make("th", { scope: "row" }, `${index + 1}. ${input[index]}`), ...cells);
  };
  const head = make("tr", "", make("td"), ...units.map((_, index) => make("th", { scope: "col" }, String(index + 1))));
  const part = data.length > units.length ? `, of the first ${units.length} of ${figure(data.length)} texts` : "";
  const caption = `Cosine similarity of vectors of ${figure(units[0].length)} dimensions${part}`;
  const table = make("table", "similarities", make("caption", "hint", caption), head, ...units.map(row));
  return make("div", { className: "table", tabIndex: 0 }, table);
}

const dot = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);

function unit(vector) {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((value) => value / length);
}
