// SPDX-License-Identifier: Apache-2.0
// Forms for encoders: what goes in, where it is asked, and how the answer is drawn. Knows no conversation.

import { curlCommand, post } from "./api.js";
import { figure } from "./conversation.js";
import { make } from "./inline.js";
import { announce, copy } from "./view.js";

const QUESTION = "How far is the harbour?";
const TEXTS = ["It is a mile away.", "Bread is baked in the morning.", "The port is near."].join("\n");
const PEOPLE = "Anna lives in Berlin and works for the Post.";
const MASKED = "Text with a mask token, such as [MASK] or <mask>";

/** By task: its endpoint, what draws an answer, and the fields with label and example, whose `lines` may be texts each. */
const FORMS = {
  "text-classification": ["v1/classify", drawLabels, { name: "input", label: "Text", value: PEOPLE }],
  "token-classification": ["v1/token-classification", drawEntities, { name: "input", label: "Text", value: PEOPLE }],
  "fill-mask": ["v1/fill-mask", drawFills, { name: "input", label: MASKED, value: "The sea is [MASK]." }],
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
export function hasForm(task) {
  return task in FORMS;
}

/** Draw a model's form in an element; `key` tells the API key. */
export function showForm(element, model, key) {
  const [path, draw, ...fields] = FORMS[model.task];
  const labels = fields.map(({ name, label, value, lines }) =>
    make("label", "", label, make("textarea", { name, value, rows: lines ? 5 : 2, dir: "auto", required: true })),
  );
  element.querySelector(".fields").replaceChildren(...labels);
  element.querySelector(".result").replaceChildren();
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
  button.disabled = true;
  try {
    let answer = await post(request(), key);
    if (draw === drawLabels) {
      body.top_k = Math.min(answer.data[0].num_classes, 20); // the first answer tells how many labels there are
      answer = await post(request(), key);
    }
    const tokens = answer.usage ? `${figure(answer.usage.total_tokens)} tokens · ` : "";
    const words = `${tokens}${figure(performance.now() - startMs)} ms`;
    const curl = make("button", { type: "button" }, "Copy as curl");
    curl.onclick = () => copy(curlCommand(request(), key !== null), curl);
    const foot = make("div", "foot", make("span", "figures", words), make("span", "actions", curl));
    result.replaceChildren(draw(answer, body), foot);
    announce(result.firstChild.innerText);
  } catch (error) {
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

/** The text with its entities marked. Places count code points. */
function drawEntities({ data: [{ entities }] }, { input }) {
  if (!entities.length) return make("p", "hint", "The model finds no entity in this text.");
  const letters = [...input];
  const text = make("p", "text");
  let at = 0;
  for (const { start, end, entity_group: label, score } of entities) {
    const mark = make("mark", { title: figure(score) }, letters.slice(start, end).join(""), make("small", "", label));
    text.append(letters.slice(at, start).join(""), mark);
    at = end;
  }
  text.append(letters.slice(at).join(""));
  return text;
}

function drawSimilarities({ data }, { input }) {
  const vectors = data.map(({ embedding }) => embedding);
  const row = (text, index) => {
    const cells = vectors.map((vector) => {
      const cosine = similarity(vectors[index], vector);
      const cell = make("td", "", cosine.toFixed(2));
      cell.style.setProperty("--share", `${Math.round(45 * Math.max(0, cosine))}%`);
      return cell;
    });
    return make("tr", "", make("th", { scope: "row" }, `${index + 1}. ${text}`), ...cells);
  };
  const head = make("tr", "", make("td"), ...input.map((_, index) => make("th", { scope: "col" }, String(index + 1))));
  const caption = make("caption", "hint", `Cosine similarity of vectors of ${figure(vectors[0].length)} dimensions`);
  return make("div", { className: "table", tabIndex: 0 }, make("table", "similarities", caption, head, ...input.map(row)));
}

function similarity(one, other) {
  const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other) || 1);
}
