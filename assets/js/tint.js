// Text tinted by the tokens that came in one step, with the CSS Custom Highlight API: the DOM stays
// as it is, so a copy is clean. The value says which rows of the conversation have pieces, and
// brings the pieces this tab does not have: {"rows": [[row, key]], "new": {key: [tokens, text]}}.
import { align, range, textNodes } from "./align.js";
import { blockOf } from "./block.js";
import { inNextFrame, make, whenDrawn } from "./elements.js";
import { reach } from "./hover.js";
import { store, stored } from "./page.js";
import { showTyped } from "./typed.js";

const { root, onValue } = blockOf("tint");
const KEY = "medusa-chat-tint";
const LEVELS = 5; // the last one: that many or more

const label = make("label", "");
const box = make("input", "");
const legend = make("span", "tint-legend");
box.type = "checkbox";
box.id = "tint-switch";
label.append(box, document.createTextNode("Colours"));
label.title = "Colour the answers by tokens per step";
for (let n = 1; n <= LEVELS; n++) {
  const mark = make("span", `tint-${n}`, n < LEVELS ? n : `${n}+`);
  mark.title = `${mark.textContent} token${n > 1 ? "s" : ""} in one step`;
  legend.append(mark);
}
legend.append("\u00a0a step");
root.replaceChildren(label, legend);
legend.setAttribute("aria-hidden", "true");

const has = typeof Highlight === "function" && CSS.highlights;
const levels = [];
export const known = new Map(); // key -> pieces
const drawn = new Map(); // an element -> {ranges, key, size} of its tint
export let rows = [];
let livePieces = [];
let liveAt = 0;
let liveCost = 0;
const schedule = inNextFrame(draw);
let areRowsNew = true; // since they were tinted: they are not looked at for each word that comes

// Chromium, which has this property, hands a highlight down to all that is inside: a rule for every
// element makes each change of a long conversation dear. Others need it.
document.documentElement.classList.toggle("each-is-lit", !CSS.supports("-webkit-app-region: drag"));
for (let n = 1; n <= LEVELS && has; n++) {
  levels[n] = new Highlight();
  CSS.highlights.set(`tokens-${n}`, levels[n]);
}

// ---- what is tinted now ----

// Ranges of one element: as few as there are changes of level within each text node.
function tinted(target, pieces) {
  const nodes = textNodes(target);
  const found = align(nodes, pieces);
  const ranges = [];
  let r = 0;
  for (const node of nodes) {
    let from = 0;
    let level = 0;
    const close = (to) => {
      if (level && to > from) ranges.push([level, range(node, from, to)]);
    };
    for (let k = 0; k < node.data.length; k++) {
      if (/\s/.test(node.data[k])) continue;
      const now = Math.min(LEVELS, found[r++]);
      if (now === level) continue;
      close(k);
      from = k;
      level = now;
    }
    close(node.data.trimEnd().length);
  }
  return ranges;
}

function wipe(target) {
  for (const [level, one] of drawn.get(target)?.ranges || []) levels[level].delete(one);
  drawn.delete(target);
}

function tint(target, key, pieces) {
  const first = textNodes(target)[0];
  const size = target.textContent.length;
  const now = drawn.get(target);
  if (now && now.key === key && now.size === size && now.first === first) return;
  wipe(target);
  const ranges = tinted(target, pieces);
  for (const [level, one] of ranges) levels[level].add(one);
  drawn.set(target, { ranges, key, size, first });
}

function draw() {
  if (areRowsNew) drawRows();
  if (has) drawLive();
}

function drawRows() {
  areRowsNew = false;
  const all = document.querySelectorAll("#history .message-row");
  const wanted = new Set([liveText()]);
  for (const [row, key] of rows) {
    const target = all[row]?.querySelector(".message-content");
    reach(target);
    if (!target || !has || !box.checked || !known.has(key)) continue;
    wanted.add(target);
    tint(target, key, known.get(key));
  }
  for (const target of [...drawn.keys()]) if (!wanted.has(target)) wipe(target);
}

function liveText() {
  return document.querySelector("#live-text .md");
}

// The text that comes is drawn anew at each update: its tint may take a tenth of the time.
function drawLive() {
  const target = liveText();
  if (!box.checked || !livePieces.length || !target?.textContent) return wipe(target);
  const start = performance.now();
  if (start < liveAt + 9 * liveCost) {
    setTimeout(schedule, 9 * liveCost);
    return;
  }
  tint(target, "live", livePieces);
  liveAt = performance.now();
  liveCost = liveAt - start;
}

function scheduleRows() {
  areRowsNew = true;
  schedule();
}

// ---- the answer whose steps are shown ----

let shownAnswer = null;

function mark() {
  const keys = new Map(rows);
  document.querySelectorAll("#history .message-row").forEach((row, place) => {
    const isShown = Number(keys.get(place) ?? NaN) === shownAnswer;
    if (row.classList.contains("is-shown") !== isShown) row.classList.toggle("is-shown", isShown);
  });
}

window.addEventListener("medusa-answer", (event) => {
  if (event.detail === shownAnswer) return;
  shownAnswer = event.detail;
  mark();
});

// ---- what comes in ----

function take(line) {
  if (!line) return;
  for (const key in line.new) known.set(key, line.new[key]);
  rows = line.rows;
  showTyped(line.typed);
  scheduleRows();
  requestAnimationFrame(mark);
}

function show() {
  root.dataset.on = String(box.checked);
  scheduleRows();
}

box.disabled = !has;
if (!has) label.title = "this browser cannot tint text without changing it";
box.checked = Boolean(has) && stored("localStorage", KEY) === "on";
box.addEventListener("change", () => {
  store("localStorage", KEY, box.checked ? "on" : "off");
  show();
});
window.addEventListener("medusa-live", (event) => {
  livePieces = event.detail.pieces;
  if (box.checked) schedule();
});
onValue(take);
show();

whenDrawn("history", () => {
  if (has && box.checked) scheduleRows();
  mark();
});
whenDrawn("live-text", () => {
  if (has && box.checked) schedule();
});

// Text that is selected in the answer that comes stays selected: Gradio draws its Markdown anew while
// it grows, and at the end in the conversation. It is found again by how much text stands before it.
let selected = null; // {from, to, text, before}: behind how many rows

function answers() {
  return [...document.querySelectorAll("#history .bot .message-content .md")];
}

function offsetIn(prose, node, offset) {
  const before = range(prose, 0, 0);
  before.setEnd(node, offset);
  return before.toString().length;
}

function placeIn(prose, offset) {
  const texts = document.createTreeWalker(prose, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { length } = texts.currentNode;
    if (offset <= length) return [texts.currentNode, offset];
    offset -= length;
  }
  return [prose, 0];
}

function noteSelected() {
  const live = liveText();
  const now = getSelection();
  const isInside = live?.contains(now.anchorNode) && live.contains(now.focusNode);
  if (isInside && !now.isCollapsed) {
    const from = offsetIn(live, now.anchorNode, now.anchorOffset);
    const to = offsetIn(live, now.focusNode, now.focusOffset);
    selected = { from, to, text: String(now), before: answers().length };
  } else if (live?.textContent || !now.isCollapsed) selected = null; // else the text has just gone
}

function selectAgain() {
  const isWriting = document.activeElement?.matches("textarea, input");
  if (!selected || isWriting || !getSelection().isCollapsed) return;
  const { from, to, text, before } = selected;
  for (const prose of [liveText(), ...answers().slice(before)]) {
    if (!prose?.textContent) continue;
    getSelection().setBaseAndExtent(...placeIn(prose, from), ...placeIn(prose, to));
    if (String(getSelection()) === text) return;
    getSelection().removeAllRanges();
  }
}

document.addEventListener("selectionchange", noteSelected);
whenDrawn("live-text", selectAgain);
whenDrawn("history", selectAgain);
