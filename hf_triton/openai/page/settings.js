// SPDX-License-Identifier: Apache-2.0
// Reads the settings' form. A field that is left empty is not sent; what a value may be is the gateway's to say.

import { otherFieldsProblem } from "./conversation.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** The mode, the system prompt, and the parameters as they are sent. The form must be valid. */
export function readSettings(form) {
  const { elements } = form;
  const given = NUMBERS.filter((name) => elements[name].value !== "");
  const stop = elements.stop.value.split("\n").filter((line) => line !== "").map(unescape);
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

/** Let the browser refuse other fields that cannot be sent. */
export function watchOtherFields(form) {
  const { extra } = form.elements;
  extra.addEventListener("input", () => extra.setCustomValidity(otherFieldsProblem(extra.value)));
}

function unescape(line) {
  return line.replace(/\\[nt\\]/g, (escape) => ESCAPES[escape]);
}
