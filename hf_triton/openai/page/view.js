// SPDX-License-Identifier: Apache-2.0
// Draws turns. A model's output is data: it enters the document as text, never as markup.

import { describe } from "./conversation.js";

const NEAR_THE_END_PX = 80;

/** One turn in the document; `update` draws what the turn has become. */
export class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.element = document.getElementById("turn-template").content.firstElementChild.cloneNode(true);
    this.part(".prompt").textContent = turn.prompt;
    this.part(".speaker").textContent = turn.model;
    this.content = addText(this.part(".content"));
    this.reasoning = addText(this.part(".reasoning .text"));
    this.update();
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  update() {
    const { turn } = this;
    followTheEnd(() => {
      grow(this.content, turn.mode === "chat" ? turn.content.trimStart() : turn.content);
      grow(this.reasoning, turn.reasoning.trimStart());
      this.part(".reasoning").hidden = !turn.reasoning;
      this.part(".tool-calls").replaceChildren(...turn.toolCalls.map(drawToolCall));
      this.part(".error").textContent = turn.error?.message ?? "";
      this.part(".error").hidden = !turn.error;
      this.part(".figures").textContent = describe(turn);
      this.part(".actions").hidden = turn.isRunning;
      this.part("[data-action=switch]").hidden = !lacksChatTemplate(turn);
      this.part("[data-action=copy]").hidden = !turn.content;
      this.element.classList.toggle("running", turn.isRunning);
    });
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
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

function confirmOn(button) {
  const label = button.textContent;
  button.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (button.textContent = label), 1500);
}

function lacksChatTemplate(turn) {
  return turn.mode === "chat" && !turn.isRunning && /chat template/i.test(turn.error?.message ?? "");
}

function drawToolCall({ function: called }) {
  const element = document.createElement("pre");
  element.textContent = `${called.name}(${called.arguments})`;
  return element;
}

function addText(element) {
  return element.appendChild(document.createTextNode(""));
}

function grow(node, text) {
  if (text.length > node.length) node.appendData(text.slice(node.length));
}
