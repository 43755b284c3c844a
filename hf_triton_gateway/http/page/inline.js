// SPDX-License-Identifier: Apache-2.0
// Makes nodes of a paragraph of Markdown: code, emphasis, links. Maths stays text. One pass, whatever the text holds.

const TOKEN = new RegExp(
  [
    /\$\$[^$]{1,1000}\$\$|\\\([^\n]{1,300}?\\\)|\\\[[^]{1,1000}?\\\]/, // maths
    /\$(?!\s)[^$\n]{0,300}[^\s$\\]\$(?![\d$])/, // maths, not prices
    /\\[\n!-/:-@[-`{-~]/, // an escape
    /`+|\*+|_+|~{2,}|!?\[|\]|<br ?\/?>/,
    /<[a-z]{2,10}:[^\s<>]{1,2000}>/,
    /(?<![\w/])https?:\/\/[^\s<>[\]]{1,2000}/,
  ].map((part) => part.source).join("|"),
  "gi",
);
const DESTINATION = /\(\s*<?((?:[^\s<>()]|\([^\s<>()]{0,200}\)){1,2000})>?(?:\s+(?:"[^"]{0,500}"|'[^']{0,500}'))?\s*\)/y;
const SCHEMES = ["http:", "https:", "mailto:"];
const ELEMENTS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };
const MAX_OPEN = 50; // of emphasis and links that wait for their end: what is nested deeper stays text

/** An element with a class, or with properties, and with children, which may be strings. */
export function make(name, properties, ...children) {
  const element = document.createElement(name);
  Object.assign(element, typeof properties === "string" ? properties && { className: properties } : properties);
  element.append(...children);
  return element;
}

/** The nodes of a text. */
export function inline(text) {
  return new Inline(text).read();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.out = document.createDocumentFragment();
    this.open = []; // { node, char, count }: the text nodes of `*`, `_`, `~~`, `[` and `![` that may begin something
    this.scan = new RegExp(TOKEN);
    this.absent = new Set(); // the ends of code that do not come any more
  }

  read() {
    let at = 0;
    for (let match; (match = this.scan.exec(this.text)); at = this.scan.lastIndex) {
      this.out.append(this.text.slice(at, match.index));
      this.token(match[0], match.index);
    }
    this.out.append(this.text.slice(at));
    this.out.normalize();
    return this.out;
  }

  token(token, start) {
    if (token[0] === "`") this.code(token);
    else if (token[0] === "$") this.out.append(token);
    else if (token[0] === "\\") this.out.append(token.length > 2 ? token : token[1]);
    else if (token.endsWith("[")) this.begin(token, 1);
    else if (token === "]") this.endLink();
    else if (/^<br/i.test(token)) this.out.append(make("br"));
    else if (token[0] === "<") this.out.append(safeLink(token.slice(1, -1), token.slice(1, -1)) ?? token);
    else if (/^http/i.test(token)) this.address(token, start);
    else this.emphasis(token, this.text[start - 1] ?? " ", this.text[start + token.length] ?? " ");
  }

  /** Code between two equal marks; the mark is text if it does not come again. */
  code(token) {
    const end = new RegExp(`(?<!\`)${token}(?!\`)`, "g");
    const from = (end.lastIndex = this.scan.lastIndex);
    const found = this.absent.has(token) ? null : end.exec(this.text);
    if (found) this.scan.lastIndex = end.lastIndex;
    else this.absent.add(token);
    this.out.append(found ? codeSpan(this.text.slice(from, found.index)) : token);
  }

  /** An address in the text, without the punctuation behind it; part of a label stays text. */
  address(token, start) {
    const trimmed = token.replace(/[.,;:!?'"*_~]+$/, "");
    const url = trimmed.includes("(") ? trimmed : trimmed.replace(/\).*$/, "");
    this.scan.lastIndex = start + url.length;
    this.out.append((this.open.some(({ char }) => char === "[") ? null : safeLink(url, url)) ?? url);
  }

  begin(token, count) {
    const node = document.createTextNode(token);
    this.out.append(node);
    this.open.push({ node, char: token.at(-1), count });
    if (this.open.length > MAX_OPEN) this.open.shift();
  }

  emphasis(token, before, after) {
    const char = token[0];
    const isWord = (other) => char === "_" && /[\p{L}\p{N}_]/u.test(other); // snake_case is no emphasis
    const canClose = !/\s/.test(before) && !isWord(after);
    let count = token.length;
    for (let opener; canClose && count && count < 4 && (opener = this.opener(char)); ) {
      const size = Math.min(count, opener.count, 2);
      if (!ELEMENTS[char][size - 1]) break;
      this.wrap(opener, make(ELEMENTS[char][size - 1]));
      opener.node.data = char.repeat((opener.count -= size));
      if (!opener.count) this.open.pop();
      count -= size;
    }
    if (count && count < 4 && !/\s/.test(after) && !isWord(before)) this.begin(char.repeat(count), count);
    else this.out.append(char.repeat(count));
  }

  /** The last mark of a kind; those after it begin nothing. */
  opener(char) {
    const index = this.open.findLastIndex((mark) => mark.char === char);
    if (index >= 0) this.open.length = index + 1;
    return this.open[index];
  }

  endLink() {
    DESTINATION.lastIndex = this.scan.lastIndex;
    const destination = this.open.some(({ char }) => char === "[") && DESTINATION.exec(this.text);
    const link = destination && safeLink(destination[1]);
    if (!link) {
      const last = this.open.findLastIndex((mark) => mark.char === "[");
      if (last >= 0) this.open.splice(last, 1);
      this.out.append("]");
      return;
    }
    const bracket = this.opener("[");
    this.wrap(bracket, link);
    bracket.node.remove(); // an image is a link to it: the page loads nothing from elsewhere
    if (!link.hasChildNodes()) link.append(destination[1]);
    this.open = this.open.filter((mark) => mark.char !== "["); // no link holds another
    this.scan.lastIndex = DESTINATION.lastIndex;
  }

  /** Move what follows a mark into an element. */
  wrap({ node }, element) {
    while (node.nextSibling) element.append(node.nextSibling);
    this.out.append(element);
  }
}

function codeSpan(code) {
  const line = code.replaceAll("\n", " ");
  const isPadded = line.startsWith(" ") && line.endsWith(" ") && line.trim();
  return make("code", "", isPadded ? line.slice(1, -1) : line);
}

/** A link to an address, or null where a click could do more than go there. */
function safeLink(address, ...label) {
  if (!URL.canParse(address) || !SCHEMES.includes(new URL(address).protocol)) return null;
  return make("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, ...label);
}
