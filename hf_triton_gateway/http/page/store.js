// SPDX-License-Identifier: Apache-2.0
// Keeps values in this browser. Storage may be full or forbidden: then nothing is kept, and the page goes on.

const PREFIX = "hf_triton.";

/** What storage gives, or something else if it gives nothing. */
export function attempt(work, otherwise) {
  try {
    return work() ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** A value, or undefined. */
export const read = (name) => attempt(() => JSON.parse(localStorage.getItem(PREFIX + name)));

/** Keep a value; false if the browser does not. */
export const write = (name, value) =>
  attempt(() => localStorage.setItem(PREFIX + name, JSON.stringify(value)) ?? true, false);

export const remove = (name) => attempt(() => localStorage.removeItem(PREFIX + name));

/** The names of values that begin with a text. */
export function names(start) {
  const keys = attempt(() => Object.keys(localStorage), []);
  return keys.filter((key) => key.startsWith(PREFIX + start)).map((key) => key.slice(PREFIX.length));
}
