// From the words of an answer to its steps: a word under the pointer shows its step, a click goes
// there, and shows that answer's steps first where others are shown. No request for a hover.
import { align, range, textNodes } from "./align.js";
import { inNextFrame, withRole } from "./elements.js";
import { answerWords } from "./steps.js";
import { known, rows } from "./tint.js";

const pointedAt = typeof Highlight === "function" && CSS.highlights ? new Highlight() : null;
const placed = new WeakMap(); // a row's content -> {key, size, first, at} of its characters
const conversation = document.getElementById("conversation");
let pending = null; // {answer, at}: a click on an answer whose steps are not shown yet

if (pointedAt) CSS.highlights.set("step-pointed", pointedAt);

// The place in its row's text of each drawn character, by text node; -1 where it is not in it.
function placesOf(target, key) {
  const nodes = textNodes(target);
  const size = target.textContent.length;
  const before = placed.get(target);
  if (before && before.key === key && before.size === size && before.first === nodes[0]) return before.at;
  let length = 0;
  const numbered = known.get(key).flatMap((part, n) =>
    n % 2 ? [...part.split("")].flatMap((c) => [++length, c]) : [],
  );
  const found = align(nodes, numbered);
  let r = 0;
  const at = new Map(nodes.map((node) => [node, node.data.split("").map((c) => (/\S/.test(c) ? found[r++] : 0) - 1)]));
  placed.set(target, { key, size, first: nodes[0], at });
  return at;
}

// The character under the pointer: {node, offset}, or null beside the text.
function characterAt(x, y) {
  const caret = document.caretPositionFromPoint?.(x, y);
  const old = caret || !document.caretRangeFromPoint ? null : document.caretRangeFromPoint(x, y);
  const [node, end] = caret ? [caret.offsetNode, caret.offset] : [old?.startContainer, old?.startOffset];
  if (node?.nodeType !== Node.TEXT_NODE) return null;
  for (const offset of [end, end - 1]) {
    if (offset < 0 || offset >= node.data.length) continue;
    const box = range(node, offset, offset + 1).getBoundingClientRect();
    if (x >= box.left && x <= box.right && y >= box.top && y <= box.bottom) return { node, offset };
  }
  return null;
}

// Which character of which answer's text that is: {answer, at, places}, or null.
function wordAt(event) {
  const target = event.target.closest?.("#history .bot .message-content");
  if (!target || event.target.closest("a, button, input, textarea, summary")) return null;
  const row = [...document.querySelectorAll("#history .message-row")].indexOf(target.closest(".message-row"));
  const key = new Map(rows).get(row);
  const under = known.has(key) && characterAt(event.clientX, event.clientY);
  if (!under) return null;
  const places = placesOf(target, key);
  const at = places.get(under.node)?.[under.offset] ?? -1;
  return at < 0 ? null : { answer: Number(key), at, places, target };
}

function rangesOf({ places }, { from, to }) {
  const ranges = [];
  for (const [node, at] of places) {
    const inside = at.flatMap((place, offset) => (place >= Math.max(0, from) && place < to ? [offset] : []));
    if (inside.length) ranges.push(range(node, inside[0], inside.at(-1) + 1));
  }
  return ranges;
}

function point(event) {
  const word = event.buttons ? null : wordAt(event);
  const found = word && answerWords.isShown(word.answer) ? answerWords.stepAt(word.at) : null;
  document.querySelector(".message-content.has-step")?.classList.remove("has-step");
  pointedAt?.clear();
  if (word) word.target.classList.add("has-step");
  if (found) for (const one of rangesOf(word, found)) pointedAt?.add(one);
  if (found || isPointing) answerWords.point(found ? found.step : null);
  isPointing = Boolean(found);
}
let isPointing = false;

function press(event) {
  pending = null;
  if (!event.target.closest?.("#history .bot .message-content")) return;
  if (!getSelection().isCollapsed) return event.stopPropagation(); // text was selected: no click
  const word = wordAt(event);
  if (!word) return;
  if (!answerWords.isShown(word.answer)) pending = word;
  else goToWord(word);
}

// By the keyboard an answer's steps are shown as by a click beside its words.
export function reach(target) {
  if (!target || target.hasAttribute("tabindex")) return;
  withRole(target, "group", "Answer. Enter shows its steps.").tabIndex = 0;
}

conversation.addEventListener("keydown", ({ key, target }) => {
  if (key === "Enter" && target.matches?.("#history .bot .message-content")) target.click();
});

function goToWord({ at }) {
  const found = answerWords.stepAt(at);
  if (found) answerWords.go(found.step);
}

window.addEventListener("medusa-answer", () =>
  requestAnimationFrame(() => {
    if (!pending || !answerWords.isShown(pending.answer)) return;
    goToWord(pending);
    pending = null;
  }),
);
conversation.addEventListener("click", press, true);
let moved = null; // the last move of the pointer
const pointSoon = inNextFrame(() => point(moved));
conversation.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch") return;
  moved = event;
  pointSoon();
});
conversation.addEventListener("pointerleave", (event) => point(event));
