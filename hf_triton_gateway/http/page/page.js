// SPDX-License-Identifier: Apache-2.0
// The page: what a key or a button does. The gateway's key lives in this tab alone, and in its sessionStorage.

import { ApiError, curlCommand, listModels, stream } from "./api.js";
import { addChunk, answered, buildRequest, contextUsed, figure, newTurn, roomLeft } from "./conversation.js";
import * as history from "./history.js";
import { drawDraft, readImage } from "./images.js";
import * as settings from "./settings.js";
import { hasForm, showForm } from "./tasks.js";
import { attempt } from "./store.js";
import { TurnView, announce, copy, followTheEnd } from "./view.js";

const KEY = "hf_triton.openai.key";
const OPEN = "hf_triton.open"; // the conversation of this tab
const NEARLY_FULL = 0.9; // of a model's context
const WIDE = window.matchMedia("(min-width: 60rem)");
const $ = (id) => document.getElementById(id);
const form = $("settings-form");
const keptModel = settings.restoreSettings(form);

let models = [];
let conversation = history.newConversation();
let running = null; // the AbortController of the answer that is streaming
let images = []; // of the message that is being written
let isEditing = false;
let retryWithKey = null; // what to do again once there is a key
let key = attempt(() => sessionStorage.getItem(KEY), null);

const model = () => models.find(({ id }) => id === $("model").value);

// --- asking ---------------------------------------------------------------------------------------------------------
/** Ask, instead of the last turn or after it; false if an answer is running or a setting is bad. */
function ask({ prompt, images: given = [] }, { instead = false } = {}) {
  if (!isSettled()) return false;
  if (given.length && form.elements.mode.value === "completion") {
    show("note", "Completion takes no images: choose Chat in the settings.");
    return false;
  }
  if (instead) conversation.turns.pop().view.element.remove();
  const turn = newTurn(prompt, { ...settings.readSettings(form), model: model().id }, given);
  setEditing(null);
  followTheEnd(() => addTurn(turn));
  window.scrollTo(0, document.documentElement.scrollHeight);
  run(turn);
  $("model").selectedOptions[0].textContent = model().id; // one that sleeps wakes
  return true;
}

function addTurn(turn) {
  turn.view = new TurnView(turn);
  conversation.turns.push(turn);
  $("turns").append(turn.view.element);
}

async function run(turn) {
  const controller = new AbortController();
  const { turns } = conversation;
  setRunning(controller);
  keep();
  announce("The model answers.");
  try {
    for await (const chunk of stream(buildRequest(turns, turn), key, controller.signal)) {
      addChunk(turn, chunk);
      turn.view.updateSoon();
    }
  } catch (error) {
    fail(turn, error, controller.signal.aborted);
  }
  turn.isRunning = false;
  turn.view.update();
  if (running !== controller) return; // another conversation is open
  setRunning(null);
  keep();
  announce(turn.error?.message ?? turn.content);
}

function fail(turn, error, isAborted) {
  turn.wasStopped = isAborted;
  if (isAborted) return;
  const message = error instanceof ApiError ? error.message : `The connection broke: ${error.message}`;
  turn.error = { message, code: error.code };
  if (error.status === 401) askForKey(() => conversation.turns.at(-1) === turn && ask(turn, { instead: true }));
}

/** Whether a model is chosen, nothing is running, and the settings can be sent; it shows the first that cannot. */
function isSettled() {
  show("note", running ? "An answer is running. Stop it first, or wait: your text stays." : "");
  if (running || !model()) return false;
  if (form.checkValidity()) return true;
  showPanel("settings", true);
  if (form.elements.extra.validity.customError) form.elements.extra.focus(); // its problem stands beside it
  else form.reportValidity();
  return false;
}

function setRunning(controller) {
  running = controller;
  $("send").textContent = running ? "Stop" : "Send";
  document.body.classList.toggle("busy", Boolean(running));
  show("note", "");
}

// --- the composer ---------------------------------------------------------------------------------------------------
function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() && !images.length) return;
  if (!ask({ prompt, images }, { instead: isEditing })) return;
  $("prompt").value = "";
  setImages([]);
}

function setImages(list) {
  images = list;
  drawDraft($("images"), images);
}

/** Add files to the message that is being written, and say which cannot be. */
async function addImages(files) {
  const problems = [];
  for (const file of files) {
    try {
      if (model()?.images === "no") throw new Error(`The model ${model().id} takes no images.`);
      const before = answered(isEditing ? conversation.turns.slice(0, -1) : conversation.turns);
      const image = await readImage(file, [...before.flatMap((turn) => turn.images), ...images]);
      setImages([...images, image]);
      announce(`${image.name} is added.`);
    } catch (error) {
      problems.push(error.message);
    }
  }
  show("note", problems.join(" "));
}

function removeImage({ target }) {
  const id = target.closest("button")?.dataset.remove;
  if (!id) return;
  setImages(images.filter((image) => image.id !== id));
  announce("The image is removed.");
  $("prompt").focus();
}

/** Take the files that are pasted or dropped; text that comes with a drawing of itself, as from a table, is pasted. */
function takeFiles(event, { files, types }) {
  const isText = types.includes("text/plain") && types.includes("text/html");
  if (isText || !types.includes("Files") || document.body.classList.contains("encoder")) return;
  event.preventDefault(); // a browser opens what is dropped
  if (files.length) addImages([...files]);
}

function chooseFiles({ target }) {
  addImages([...target.files]);
  target.value = ""; // the same file may be chosen again
  $("prompt").focus();
}

/** Edit a turn, the last one, or none. */
function setEditing(turn) {
  if (turn || isEditing) {
    $("prompt").value = turn?.prompt ?? ""; // otherwise a draft stays
    setImages(turn?.images ?? []);
  }
  isEditing = Boolean(turn);
  $("editing").hidden = !turn;
  conversation.turns.at(-1)?.view.element.classList.toggle("edited", isEditing);
  $("prompt").focus();
}

/** Show a sentence, or take it away if it is empty. */
function show(id, sentence) {
  $(id).textContent = sentence;
  $(id).hidden = !sentence;
}

const ACTIONS = {
  copy: (turn, button) => copy(turn.content, button),
  "copy-code": (turn, button) => copy(button.closest(".code").querySelector("code").textContent, button),
  curl: (turn, button) => copy(curlCommand(buildRequest(conversation.turns, turn), key !== null), button),
  edit: setEditing,
  regenerate: (turn) => ask(turn, { instead: true }),
  switch: (turn) => {
    form.elements.mode.value = "completion";
    onSettings();
    ask(turn, { instead: turn === conversation.turns.at(-1) });
  },
  anew: (turn) => {
    open();
    ask(turn);
  },
  lower: (turn) => {
    form.elements.max_tokens.value = roomLeft(turn);
    onSettings();
    ask(turn, { instead: true });
  },
};

function act(event) {
  const button = event.target.closest("[data-action]");
  const turn = conversation.turns.find(({ view }) => view.element.contains(button));
  if (turn) ACTIONS[button.dataset.action](turn, button);
}

// --- conversations --------------------------------------------------------------------------------------------------
/** Show a kept conversation, or a new one, instead of the one that is open, whose answer stops. */
function open(id) {
  stopAndKeep();
  setEditing(null);
  const other = history.openConversation(id);
  if (!WIDE.matches) showPanels();
  conversation = { ...other, turns: [] };
  $("turns").replaceChildren();
  other.turns.forEach(addTurn);
  window.scrollTo(0, document.documentElement.scrollHeight);
  showHistory();
}

function stopAndKeep() {
  if (!running) return;
  running.abort();
  setRunning(null);
  keep();
}

/** Keep the conversation in this browser, and draw what tells its state. */
function keep() {
  $("unkept").hidden = !conversation.turns.length || history.saveConversation(conversation);
  showHistory();
}

/** Draw what tells the conversation's state; a reload opens it again. */
function showHistory() {
  attempt(() => sessionStorage.setItem(OPEN, conversation.id));
  history.drawHistory($("chats"), conversation.id);
  const [used, size] = [contextUsed(conversation.turns), model()?.max_model_len ?? 0];
  $("context").hidden = !used || !size;
  Object.assign($("context-meter"), { max: size, value: used, high: NEARLY_FULL * size });
  const advice = used > NEARLY_FULL * size ? " It is nearly full: start a new chat." : "";
  $("context-text").textContent = `${figure(used)} of ${figure(size)} tokens of context.${advice}`;
}

function onHistory({ target }) {
  const { open: opened, remove } = target.closest("button")?.dataset ?? {};
  if (opened) open(opened);
  else if (remove) forget([remove]);
}

/** Delete what is kept, and open a new conversation if the open one was among it. */
function forget(ids) {
  ids.forEach(history.deleteConversation);
  if (!ids.includes(conversation.id)) return showHistory();
  conversation.turns = [];
  open();
}

// --- models, key, settings ------------------------------------------------------------------------------------------
async function loadModels() {
  try {
    const chosen = $("model").value || keptModel;
    models = (await listModels(key)).filter(({ task }) => task === "text-generation" || hasForm(task));
    const label = ({ id, sleeping }) => (sleeping ? `${id} (sleeps)` : id);
    $("model").replaceChildren(...models.map((each) => new Option(label(each), each.id, false, each.id === chosen)));
    show("problem", models.length ? "" : "The server has no model that is ready for this page. Load one, then reload.");
  } catch (error) {
    if (error.status === 401) askForKey(loadModels);
    else show("problem", error.message);
  }
  onModel();
}

function askForKey(retry) {
  show("problem", key === null ? "" : "The gateway refuses this API key.");
  retryWithKey = retry;
  $("key-form").hidden = false;
  $("key").focus();
}

async function useKey() {
  key = $("key").value.trim();
  attempt(() => sessionStorage.setItem(KEY, key));
  $("key").value = "";
  $("key-form").hidden = true;
  $("prompt").focus();
  await loadModels();
  if (retryWithKey !== loadModels && $("key-form").hidden) retryWithKey();
}

/** Show what the chosen model can do: a conversation, or the form of its task. */
function onModel() {
  const isEncoder = hasForm(model()?.task);
  document.body.classList.toggle("encoder", isEncoder);
  document.querySelectorAll(".model-name").forEach((element) => (element.textContent = $("model").value));
  $("starters").classList.toggle("demo", $("model").value === "demo");
  $("task-name").textContent = model()?.task ?? "";
  if (isEncoder) showForm($("task"), model(), () => key);
  $("attach").hidden = model()?.images === "no";
  settings.showDefaults(form, model()?.defaults);
  showHistory();
  onSettings();
}

function onSettings() {
  const mode = form.elements.mode.value;
  document.body.dataset.mode = mode;
  document.documentElement.dataset.theme = form.elements.theme.value;
  $("prompt").placeholder = mode === "chat" ? "Message" : "Text to continue";
  settings.checkOtherFields(form);
  $("settings-toggle").classList.toggle("changed", settings.hasSettings(form));
  if (models.length) settings.keepSettings(form, $("model").value);
}

// --- panels and keys ------------------------------------------------------------------------------------------------
/** Show or hide the history or the settings. On a narrow screen they cover the conversation, which takes no focus. */
function showPanel(name, isShown) {
  if (!isShown && $(name).contains(document.activeElement)) $(`${name}-toggle`).focus();
  for (const panel of ["history", "settings"]) {
    if (panel === name) $(panel).hidden = !isShown;
    else if (isShown && !WIDE.matches) $(panel).hidden = true;
    $(`${panel}-toggle`).setAttribute("aria-expanded", !$(panel).hidden);
  }
  document.querySelector("main").inert = isShown && !WIDE.matches;
}

function showPanels() {
  showPanel("history", false);
  showPanel("settings", WIDE.matches);
}

function onPromptKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function onEscape(event) {
  if (event.key !== "Escape" || $("copy-dialog").open) return;
  const shown = WIDE.matches ? undefined : ["history", "settings"].find((name) => !$(name).hidden);
  if (shown) showPanel(shown, false);
  else if (running) running.abort();
  else if (isEditing) setEditing(null);
}

/** Do something at an event of an element; the page sends no form itself. */
function on(id, type, action) {
  $(id).addEventListener(type, (event) => {
    if (type === "submit") event.preventDefault();
    action(event);
  });
}

on("composer", "submit", () => (running ? running.abort() : send()));
on("key-form", "submit", useKey);
on("settings-form", "submit", () => {});
on("settings-form", "input", onSettings);
on("prompt", "keydown", onPromptKey);
on("attach", "click", () => $("files").click());
on("files", "change", chooseFiles);
on("images", "click", removeImage);
on("turns", "click", act);
on("starters", "click", ({ target }) => target.matches("button") && ask({ prompt: target.textContent }));
on("model", "change", onModel);
on("new", "click", () => open());
on("chats", "click", onHistory);
on("delete-all", "click", () => window.confirm("Delete all conversations?") && forget(history.keptIds()));
on("export-json", "click", () => history.exportConversation(conversation, "json"));
on("export-markdown", "click", () => history.exportConversation(conversation, "md"));
on("reset", "click", () => settings.resetSettings(form));
for (const name of ["history", "settings"]) {
  on(`${name}-toggle`, "click", () => showPanel(name, $(name).hidden));
  on(`${name}-close`, "click", () => showPanel(name, false));
}
document.addEventListener("keydown", onEscape);
document.addEventListener("paste", (event) => takeFiles(event, event.clipboardData));
for (const type of ["dragover", "drop"]) document.addEventListener(type, (event) => takeFiles(event, event.dataTransfer));
window.addEventListener("pagehide", stopAndKeep);
WIDE.addEventListener("change", showPanels);
showPanels();
onSettings();
open(attempt(() => sessionStorage.getItem(OPEN)));
loadModels();
