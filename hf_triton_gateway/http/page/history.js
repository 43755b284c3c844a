// SPDX-License-Identifier: Apache-2.0
// The conversations that this browser keeps, each under a name of its own. Of one that goes on in two tabs, each tab's is
// kept: the second one under a new name. An image's name is kept; its data stay in this tab's memory, until a reload.

import { make } from "./inline.js";
import { names, read, remove, write } from "./store.js";

const CHAT = "chat.";
const FORMAT = 1; // of what is kept; others are passed over
const urls = new Map(); // of images, by their ids

export function newConversation() {
  return { format: FORMAT, id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, savedMs: 0, turns: [] };
}

/** A conversation that was kept, or a new one. Of an answer that was running, what had come is kept. */
export function openConversation(id) {
  const kept = readChat(CHAT + id) ?? newConversation();
  for (const turn of kept.turns) {
    Object.assign(turn, turn.isRunning && { isRunning: false, wasStopped: true });
    turn.images = imagesOf(turn).map(({ id, name }) => ({ id, name, url: urls.get(id) }));
  }
  return kept;
}

/** What is kept under a name; undefined if that is not a conversation of this format. */
function readChat(name) {
  const kept = read(name);
  const isKept = kept?.format === FORMAT && Array.isArray(kept.turns) && kept.turns.every(isTurn);
  return isKept ? { ...kept, id: name.slice(CHAT.length) } : undefined;
}

function isTurn(turn) {
  const areTexts = ["prompt", "content", "reasoning"].every((name) => typeof turn?.[name] === "string");
  const images = areTexts && imagesOf(turn);
  const areImages = Array.isArray(images) && images.every((image) => typeof image?.name === "string");
  return areImages && turn.settings && Array.isArray(turn.toolCalls) && turn.toolCalls.every((call) => call?.function);
}

/** What is kept of a turn's images; earlier releases kept none. */
const imagesOf = ({ images = [] }) => images;

/** Keep a conversation, under a new name if another tab has kept it since; false if the browser does not. */
export function saveConversation(conversation) {
  const kept = read(CHAT + conversation.id);
  if (kept && kept.savedMs !== conversation.savedMs) conversation.id = newConversation().id;
  const turns = conversation.turns.map(({ view, ...turn }) => ({ ...turn, images: turn.images.map(setUrlAside) }));
  const saved = { ...conversation, savedMs: Date.now(), turns };
  const isKept = write(CHAT + conversation.id, saved);
  if (isKept) conversation.savedMs = saved.savedMs;
  return isKept;
}

function setUrlAside({ id, name, url }) {
  if (url) urls.set(id, url);
  return { id, name };
}

export function deleteConversation(id) {
  for (const image of readChat(CHAT + id)?.turns.flatMap(imagesOf) ?? []) urls.delete(image.id);
  remove(CHAT + id);
}

export const keptIds = () => names(CHAT).map((name) => name.slice(CHAT.length));

/** Draw the list, the last conversation first. */
export function drawHistory(list, openId) {
  const kept = names(CHAT).map(readChat).filter((chat) => chat?.turns.length);
  kept.sort((one, other) => other.savedMs - one.savedMs);
  list.replaceChildren(...kept.map((chat) => drawEntry(chat, chat.id === openId)));
}

function drawEntry({ id, savedMs, turns }, isOpen) {
  const title = (turns[0].prompt.trim() || imagesOf(turns[0])[0]?.name || "").slice(0, 80);
  const form = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" };
  const time = make("time", "", new Date(savedMs).toLocaleString([], form));
  const open = make("button", { type: "button", className: "open" }, make("span", "title", title), time);
  const remover = make("button", { type: "button", title: "Delete", ariaLabel: `Delete “${title}”` }, "×");
  open.dataset.open = remover.dataset.remove = id;
  if (isOpen) open.ariaCurrent = "true";
  return make("li", "", open, remover);
}

/** Offer a conversation as a file, `json` or `md`. */
export function exportConversation({ turns }, ending) {
  const withoutView = (name, value) => (name === "view" ? undefined : value);
  const text = ending === "json" ? JSON.stringify(turns, withoutView, 2) : asMarkdown(turns);
  const link = make("a", { download: `conversation.${ending}`, href: URL.createObjectURL(new Blob([text])) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function asMarkdown(turns) {
  const parts = turns.flatMap(({ prompt, images, settings, content, toolCalls }) => [
    ...["## You", ...images.map(({ name }) => `Image: ${name}`), prompt, `## ${settings.model}`, content.trim()],
    ...toolCalls.map(({ function: called }) => `\`${called.name}(${called.arguments})\``),
  ]);
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}
