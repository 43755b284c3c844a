// SPDX-License-Identifier: Apache-2.0
// The chat page: what a key or a button does. The key of the gateway lives in this tab's sessionStorage alone.

import { ApiError, curlCommand, listModels, stream } from "./api.js";
import { addChunk, buildRequest, newTurn } from "./conversation.js";
import { readSettings, watchOtherFields } from "./settings.js";
import { TurnView, announce, copy, followTheEnd } from "./view.js";

const KEY = "hf_triton.openai.key";
const WIDE = window.matchMedia("(min-width: 60rem)");
const $ = (id) => document.getElementById(id);

let turns = [];
let running = null; // the AbortController of the answer that is streaming
let isEditing = false;
let retryWithKey = null; // what to do again once there is a key

// --- asking ---------------------------------------------------------------------------------------------------------

/** Ask, instead of the last turn or after it; false if something is running or a setting is bad. */
function ask(prompt, { instead = false } = {}) {
  if (!isSettled()) return false;
  const settings = { ...readSettings($("settings-form")), model: $("model").value };
  if (instead) turns.pop().view.element.remove();
  const turn = newTurn(prompt, settings);
  turn.request = buildRequest(turns, prompt, settings);
  turn.view = new TurnView(turn);
  turns.push(turn);
  endEditing();
  followTheEnd(() => $("turns").append(turn.view.element));
  window.scrollTo(0, document.documentElement.scrollHeight);
  run(turn);
  return true;
}

async function run(turn) {
  const controller = new AbortController();
  setRunning(controller);
  announce("The model answers.");
  try {
    for await (const chunk of stream(turn.request, sessionStorage.getItem(KEY), controller.signal)) {
      addChunk(turn, chunk);
      turn.view.update();
    }
  } catch (error) {
    fail(turn, error, controller.signal.aborted);
  }
  if (running === controller) setRunning(null);
  turn.isRunning = false;
  turn.view.update();
  announce(turn.error?.message ?? turn.content);
}

function fail(turn, error, isAborted) {
  if (isAborted) {
    turn.wasStopped = true;
    return;
  }
  turn.error = error instanceof ApiError ? error : new ApiError(`The connection broke: ${error.message}`, 0);
  if (error.status === 401) askForKey(() => turns.at(-1) === turn && ask(turn.prompt, { instead: true }));
}

/** Whether a model is chosen, nothing is running, and the browser accepts the settings; it shows the first bad one. */
function isSettled() {
  if (running || !$("model").value) return false;
  if ($("settings-form").checkValidity()) return true;
  showSettings(true);
  return $("settings-form").reportValidity();
}

function stop() {
  running?.abort();
  $("prompt").focus();
}

function setRunning(controller) {
  running = controller;
  $("send").textContent = running ? "Stop" : "Send";
  document.body.classList.toggle("busy", Boolean(running));
}

// --- the composer ---------------------------------------------------------------------------------------------------

function send() {
  const text = $("prompt").value;
  if (text.trim() && ask(text, { instead: isEditing })) $("prompt").value = "";
}

function edit(turn) {
  isEditing = true;
  $("editing").hidden = false;
  turn.view.element.classList.add("edited");
  $("prompt").value = turn.prompt;
  $("prompt").focus();
}

function endEditing() {
  isEditing = false;
  $("editing").hidden = true;
  turns.at(-1)?.view.element.classList.remove("edited");
}

function clear() {
  running?.abort();
  setRunning(null);
  turns = [];
  endEditing();
  $("turns").replaceChildren();
  $("prompt").focus();
}

const ACTIONS = {
  copy: (turn, button) => copy(turn.content, button),
  curl: (turn, button) => copy(curlCommand(turn.request, sessionStorage.getItem(KEY) !== null), button),
  edit: (turn) => edit(turn),
  regenerate: (turn) => ask(turn.prompt, { instead: true }),
  switch: (turn) => {
    $("settings-form").elements.mode.value = "completion";
    showMode();
    ask(turn.prompt, { instead: turn === turns.at(-1) });
  },
};

function act(event) {
  const button = event.target.closest("[data-action]");
  const turn = turns.find(({ view }) => view.element.contains(button));
  if (turn) ACTIONS[button.dataset.action](turn, button);
}

// --- models, key, settings ------------------------------------------------------------------------------------------

async function loadModels() {
  try {
    const names = await listModels(sessionStorage.getItem(KEY));
    const chosen = $("model").value;
    $("model").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    showProblem(names.length ? "" : "The server has no model that is ready. Load one, then reload this page.");
  } catch (error) {
    if (error.status === 401) askForKey(loadModels);
    else showProblem(error.message);
  }
  showModel();
}

function askForKey(retry) {
  const isRefused = sessionStorage.getItem(KEY) !== null;
  showProblem(isRefused ? "The gateway refuses this API key." : "");
  retryWithKey = retry;
  $("key-form").hidden = false;
  $("key").focus();
}

async function useKey() {
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  $("prompt").focus();
  await loadModels();
  if (retryWithKey !== loadModels && $("key-form").hidden) retryWithKey();
}

function showProblem(sentence) {
  $("problem").textContent = sentence;
  $("problem").hidden = !sentence;
}

function showModel() {
  document.querySelector("#welcome .name").textContent = $("model").value;
}

function showMode() {
  const mode = $("settings-form").elements.mode.value;
  document.body.dataset.mode = mode;
  $("prompt").placeholder = mode === "chat" ? "Message" : "Text to continue";
}

/** On a narrow screen the settings cover the conversation, which then takes no focus. */
function showSettings(isShown) {
  $("settings").hidden = !isShown;
  $("toggle").setAttribute("aria-expanded", isShown);
  document.querySelector("main").inert = isShown && !WIDE.matches;
}

// --- keys -----------------------------------------------------------------------------------------------------------

function onPromptKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function onEscape(event) {
  if (event.key !== "Escape" || $("copy-dialog").open) return;
  if (running) stop();
  else if (isEditing) {
    $("prompt").value = "";
    endEditing();
  } else if (!WIDE.matches && !$("settings").hidden) {
    showSettings(false);
    $("toggle").focus();
  }
}

function onSubmit(form, action) {
  $(form).addEventListener("submit", (event) => {
    event.preventDefault();
    action();
  });
}

onSubmit("composer", () => (running ? stop() : send()));
onSubmit("key-form", useKey);
onSubmit("settings-form", () => {});
watchOtherFields($("settings-form"));
$("prompt").addEventListener("keydown", onPromptKey);
$("turns").addEventListener("click", act);
$("clear").addEventListener("click", clear);
$("model").addEventListener("change", showModel);
$("toggle").addEventListener("click", () => showSettings($("settings").hidden));
$("settings-form").addEventListener("change", showMode);
document.addEventListener("keydown", onEscape);
WIDE.addEventListener("change", () => showSettings(WIDE.matches));
showSettings(WIDE.matches);
showMode();
loadModels();
