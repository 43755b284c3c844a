// SPDX-License-Identifier: Apache-2.0
// Reads and keeps the settings' form. An empty field is not sent; what a value may be is the gateway's to say.

import { otherFieldsProblem } from "./conversation.js";
import { read, write } from "./store.js";

const SETTINGS = "settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SENT = [...NUMBERS, "system", "stop", "extra"];
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** The mode, the system prompt, and the parameters as they are sent. The form must be valid. */
export function readSettings(form) {
  const { elements } = form;
  const given = NUMBERS.filter((name) => elements[name].value !== "");
  const lines = elements.stop.value.split("\n").filter((line) => line !== "");
  const stop = lines.map((line) => line.replace(/\\[nt\\]/g, (escape) => ESCAPES[escape]));
  return {
    mode: elements.mode.value,
    system: elements.system.value.trim(),
    parameters: {
      ...Object.fromEntries(given.map((name) => [name, elements[name].valueAsNumber])),
      ...(stop.length ? { stop } : {}),
      ...JSON.parse(elements.extra.value || "{}"),
    },
  };
}

/** Fill the form with what was kept; the model that was chosen. */
export function restoreSettings(form) {
  const { model, ...kept } = read(SETTINGS) ?? {};
  for (const [name, value] of Object.entries(kept)) {
    if (name in form.elements) form.elements[name].value = value;
  }
  checkOtherFields(form);
  return model;
}

export function keepSettings(form, model) {
  write(SETTINGS, { ...Object.fromEntries(new FormData(form)), model });
}

export function resetSettings(form) {
  SENT.forEach((name) => (form.elements[name].value = ""));
  form.dispatchEvent(new Event("input"));
}

/** Whether a request would differ from one without settings. */
export function hasSettings(form) {
  return SENT.some((name) => form.elements[name].value.trim());
}

/** Show what holds for empty fields: `defaults` of the model. */
export function showDefaults(form, defaults = {}) {
  NUMBERS.forEach((name) => (form.elements[name].placeholder = defaults[name] ?? ""));
}

/** Say beside the field why other fields cannot be sent. */
export function checkOtherFields(form) {
  const { extra } = form.elements;
  const problem = otherFieldsProblem(extra.value);
  extra.setCustomValidity(problem);
  extra.ariaInvalid = String(Boolean(problem));
  document.getElementById("extra-problem").textContent = problem;
}
