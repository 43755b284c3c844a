// SPDX-License-Identifier: Apache-2.0
// Draws Markdown as it arrives. The text is data: nodes are made one by one, and HTML in it stays text.

import { inline, make } from "./inline.js";

const MAX_DEPTH = 12; // of quotes and lists inside each other: deeper ones stay text
const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:\s+(?=\S)|\s*$)/;
const DELIMITER = /^:?-+:?$/;
const BOX = /^\[([ xX])\]\s+/;

/**
 * Markdown in an element. The last block is drawn again with each update, and nodes that are equal stay where they are;
 * the blocks before it are final, and are read no more.
 */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.numFinal = 0; // blocks
    this.start = 0; // of the first block that is not final, in the text
  }

  /** Draw a text that begins with that of the last update. */
  update(text) {
    const lines = text.slice(this.start).split("\n");
    const blocks = readBlocks(lines, 0);
    place(this.element, this.element.childNodes[this.numFinal], blocks.map(({ node }) => node));
    // A block begins for good once the line after its first is whole: a table's second line says what it is.
    const open = blocks.findLastIndex(({ line }) => line < lines.length - 2);
    if (open < 1) return;
    this.numFinal += open;
    this.start += lines.slice(0, blocks[open].line).join("\n").length + 1;
  }
}

/** Make the children from `old` on equal to fresh nodes, and leave what is equal already: a selection stays. */
function place(parent, old, fresh) {
  for (const node of fresh) {
    const next = old?.nextSibling;
    if (!old) parent.append(node);
    else if (old.cloneNode(false).isEqualNode(node.cloneNode(false))) place(old, old.firstChild, [...node.childNodes]);
    else if (old.data !== undefined && node.data?.startsWith(old.data)) old.appendData(node.data.slice(old.length));
    else old.replaceWith(node);
    old = next;
  }
  for (let next; old; old = next) {
    next = old.nextSibling;
    old.remove();
  }
}

// --- blocks ---------------------------------------------------------------------------------------------------------
/** The blocks of lines: each one's node, and the number of its first line. */
function readBlocks(lines, depth) {
  const blocks = [];
  for (let line = 0; line < lines.length; ) {
    if (lines[line].trim()) {
      const read = READERS.find((reader) => reader.isStart(lines, line) && (depth < MAX_DEPTH || !reader.isNested));
      const [node, next] = (read?.read ?? readParagraph)(lines, line, depth);
      blocks.push({ node, line });
      line = next;
    } else line += 1;
  }
  return blocks;
}

const READERS = [
  { isStart: (lines, at) => FENCE.test(lines[at]), read: readFence },
  { isStart: (lines, at) => HEADING.test(lines[at]), read: readHeading },
  { isStart: (lines, at) => RULE.test(lines[at]), read: (lines, at) => [make("hr"), at + 1] },
  { isStart: (lines, at) => QUOTE.test(lines[at]), read: readQuote, isNested: true },
  { isStart: (lines, at) => ITEM.test(lines[at]), read: readList, isNested: true },
  { isStart: isTable, read: readTable },
];

/** Whether a line ends the paragraph before it. Of ordered lists only a first item does: a line may begin with a year. */
function interrupts(lines, at) {
  if (!lines[at].trim()) return true;
  if (/^\s*\d/.test(lines[at]) && !/^ {0,3}1[.)] /.test(lines[at])) return false;
  return READERS.some((reader) => reader.isStart(lines, at));
}

function readParagraph(lines, first) {
  let next = first + 1;
  while (next < lines.length && !interrupts(lines, next)) next += 1;
  const text = lines.slice(first, next).map((line) => line.trim());
  return [make("p", "", inline(text.join("\n"))), next];
}

function readHeading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  const level = Math.min(6, marks.length + 2); // below the turn's own
  return [make(`h${level}`, `level-${marks.length}`, inline(text.trim().replace(/ #+$/, ""))), at + 1];
}

function readFence(lines, first) {
  const [, fence, info] = FENCE.exec(lines[first]);
  const indent = indentOf(lines[first]);
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = first + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(first + 1, end).map((line) => dedent(line, indent));
  const button = make("button", { type: "button" }, "Copy code");
  button.dataset.action = "copy-code";
  const pre = make("pre", { tabIndex: 0 }, make("code", "", code.join("\n"))); // keys scroll it
  return [make("div", "code", make("div", "bar", make("span", "", info.trim().split(/\s/)[0]), button), pre), end + 1];
}

function readQuote(lines, first, depth) {
  let next = first + 1;
  while (next < lines.length && (QUOTE.test(lines[next]) || !interrupts(lines, next))) next += 1;
  const inner = lines.slice(first, next).map((line) => line.replace(QUOTE, ""));
  return [make("blockquote", "", ...readBlocks(inner, depth + 1).map(({ node }) => node)), next];
}

function readList(lines, first, depth) {
  const [, , mark] = ITEM.exec(lines[first]);
  const isOrdered = mark.length > 1;
  const list = make(isOrdered ? "ol" : "ul");
  if (isOrdered && Number.parseInt(mark, 10) !== 1) list.start = Number.parseInt(mark, 10);
  let next = first;
  while (next < lines.length && isItem(lines[next], isOrdered)) {
    const [item, end] = readItem(lines, next, depth);
    list.append(item);
    next = end;
  }
  return [list, next];
}

function isItem(line, isOrdered) {
  const found = ITEM.exec(line);
  return Boolean(found) && found[2].length > 1 === isOrdered && !RULE.test(line);
}

/** An item and what is indented below it: models indent by two columns what belongs to `1.`, too. */
function readItem(lines, first, depth) {
  const [whole, indent, mark] = ITEM.exec(lines[first]);
  const inner = [lines[first].slice(whole.length).replace(BOX, (_, sign) => (sign === " " ? "☐ " : "☑ "))];
  let next = first + 1;
  const belongs = (line, before) => {
    if (!line.trim() || indentOf(line) >= indent.length + 2) return true;
    return Boolean(before.trim()) && !interrupts(lines, next) && !ITEM.test(line);
  };
  while (next < lines.length && belongs(lines[next], lines[next - 1])) {
    inner.push(dedent(lines[next++], indent.length + mark.length + 1));
  }
  return [make("li", "", ...readBlocks(inner, depth + 1).map(({ node }) => node)), next];
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const marks = cellsOf(lines[at + 1]);
  return marks.every((mark) => DELIMITER.test(mark)) && marks.length === cellsOf(lines[at]).length;
}

function readTable(lines, first) {
  const side = (mark) => (!mark.endsWith(":") ? "" : mark.startsWith(":") ? "center" : "end");
  const sides = cellsOf(lines[first + 1]).map(side);
  let next = first + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  const row = (line, name) => {
    const texts = cellsOf(line).slice(0, sides.length);
    return make("tr", "", ...texts.map((text, column) => make(name, sides[column], inline(text))));
  };
  const body = lines.slice(first + 2, next).map((line) => row(line, "td"));
  const table = make("table", "", make("thead", "", row(lines[first], "th")), make("tbody", "", ...body));
  return [make("div", { className: "table", tabIndex: 0 }, table), next];
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

const indentOf = (line) => /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;

function dedent(line, columns) {
  let at = 0;
  for (let column = 0; column < columns && /[ \t]/.test(line[at]); at += 1) column += line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}
