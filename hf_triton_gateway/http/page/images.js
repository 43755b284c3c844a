// SPDX-License-Identifier: Apache-2.0
// Image files of a message: { id, name, url }, whose url is a data URI. Knows neither the conversation nor the network.

import { make } from "./inline.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_MB = 10; // of a conversation's images together: a request holds them all, in base64

/** Read a file beside the images that a conversation has; the message of an error says why it cannot be sent. */
export async function readImage(file, others) {
  const name = file.name || "image";
  if (!TYPES.includes(file.type)) throw new Error(`${name} is no image of PNG, JPEG, WebP or GIF.`);
  const numBytes = others.reduce((sum, { url = "" }) => sum + 0.75 * url.length, file.size);
  if (numBytes > MAX_MB * 1e6) throw new Error(`${name} is too large: a conversation has ${MAX_MB} MB of images at most.`);
  try {
    const url = await readUrl(file);
    await make("img", { src: url }).decode();
    return { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, name, url };
  } catch {
    throw new Error(`${name} cannot be read as an image.`);
  }
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    Object.assign(reader, { onload: () => resolve(reader.result), onerror: reject });
    reader.readAsDataURL(file);
  });
}

/** An image, or what is known of one that was not kept. */
export function drawImage({ name, url }) {
  if (url) return make("img", { src: url, alt: name });
  return make("span", "hint", `${name} is not kept: the model does not see it any more.`);
}

/** The images of a message that is being written, each with a button that removes it. */
export function drawDraft(list, images) {
  const items = images.map((image) => {
    const remover = make("button", { type: "button", title: "Remove", ariaLabel: `Remove ${image.name}` }, "×");
    remover.dataset.remove = image.id;
    return make("li", "", drawImage(image), remover);
  });
  list.replaceChildren(...items);
  list.hidden = !images.length;
}
