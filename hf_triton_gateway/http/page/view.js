// SPDX-License-Identifier: Apache-2.0
// Draws turns. A model's output is data: it enters the document as text, never as markup.

import { describe, roomLeft } from "./conversation.js";
import { drawImage } from "./images.js";
import { make } from "./inline.js";
import { Markdown } from "./markdown.js";

const NEAR_THE_END_PX = 80;
const REST = 4; // times as long as drawing took, an answer that streams is left as it is

/** One turn in the document; `update` draws what the turn has become. */
export class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.isChat = turn.settings.mode === "chat";
    this.element = document.getElementById("turn-template").content.firstElementChild.cloneNode(true);
    this.part(".images").replaceChildren(...turn.images.map(drawImage));
    this.part(".prompt").textContent = turn.prompt;
    this.part(".speaker").textContent = turn.settings.model;
    this.part(".content").classList.toggle("text", !this.isChat);
    this.markdown = new Markdown(this.part(".content"));
    this.update();
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  /** Draw with the next frame, or later if drawing takes long, however many chunks come until then. */
  updateSoon() {
    this.timer ??= setTimeout(() => this.update(), 16 + REST * this.drawMs);
  }

  update() {
    clearTimeout(this.timer);
    this.timer = undefined;
    const startMs = performance.now();
    followTheEnd(() => this.draw(this.turn));
    this.drawMs = performance.now() - startMs;
  }

  draw(turn) {
    if (this.isChat) this.markdown.update(turn.content.trimStart());
    else grow(this.part(".content"), turn.content);
    grow(this.part(".reasoning .text"), turn.reasoning.trimStart());
    this.part(".reasoning").hidden = !turn.reasoning;
    const calls = turn.toolCalls.map(({ function: called }) => make("pre", "", `${called.name}(${called.arguments})`));
    this.part(".tool-calls").replaceChildren(...calls);
    this.part(".error").textContent = turn.error?.message ?? "";
    this.part(".error").hidden = !turn.error;
    this.part(".figures").textContent = describe(turn);
    this.part(".actions").hidden = turn.isRunning;
    const room = roomLeft(turn);
    this.part("[data-action=switch]").hidden = !this.isChat || !/chat template/i.test(turn.error?.message ?? "");
    this.part("[data-action=anew]").hidden = room === undefined;
    this.part("[data-action=lower]").hidden = !room;
    this.part("[data-action=lower]").textContent = `Lower max_tokens to ${room}`;
    this.part("[data-action=copy]").hidden = !turn.content;
    this.element.classList.toggle("running", turn.isRunning);
  }
}

/** Change the document, and keep its end in sight if it was. */
export function followTheEnd(change) {
  const root = document.documentElement;
  const wasAtEnd = root.scrollHeight - root.clientHeight - root.scrollTop < NEAR_THE_END_PX;
  change();
  if (wasAtEnd) root.scrollTop = root.scrollHeight;
}

/** Copy text, or show it where the browser lets no page copy. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    confirmOn(button);
  } catch {
    document.getElementById("copy-text").value = text;
    document.getElementById("copy-dialog").showModal();
    document.getElementById("copy-text").select();
  }
}

/** Say something to screen readers. */
export const announce = (text) => (document.getElementById("announcer").textContent = text);

function confirmOn(button) {
  button.dataset.label ??= button.textContent;
  button.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (button.textContent = button.dataset.label), 1500);
}

/** Add what a text has more than the element. */
function grow(element, text) {
  const node = element.firstChild ?? element.appendChild(document.createTextNode(""));
  if (text.length > node.length) node.appendData(text.slice(node.length));
}
