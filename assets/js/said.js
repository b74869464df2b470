// The text of the answer that runs, as far as it was said. Drawing it as Markdown is dear, so that it
// grows by bare words in between.
import { blockOf } from "./block.js";
import { inert } from "./inert.js";
import { page } from "./page.js";

const { trigger } = blockOf("next");
const WRITE_EVERY = 250; // ms between two drawings of the text as Markdown
const LONG = 4000; // characters from which they come less often
const bare = document.createTextNode(""); // what is said, but not drawn as Markdown yet
const redrawn = new MutationObserver(() => {
  drawn = handed;
  addBare();
});
// After the end the bare words stay until the whole is drawn: no frame shows less.
const ended = new MutationObserver(() => {
  ended.disconnect();
  bare.remove();
});
const CHANGES = { childList: true, characterData: true, subtree: true };
let said = "";
let handed = ""; // what there was of it when it was last handed to be drawn
let drawn = ""; // what is drawn of it
let writing = 0; // the timer of the next one
let wroteAt = 0;

// A stream begins: what is drawn is heard of until it ends.
export function beginSaid() {
  [said, handed, drawn] = ["", "", ""];
  ended.disconnect();
  redrawn.observe(document.getElementById("live-text"), CHANGES);
}

export function endSaid() {
  redrawn.disconnect();
  ended.observe(document.getElementById("live-text"), CHANGES);
  write();
}

export function addSaid(more) {
  setSaid(said + more);
}

export function setSaid(text) {
  const isMore = said && text.startsWith(said);
  said = text;
  if (isMore) addBare();
  if (writing) return;
  const pause = WRITE_EVERY * Math.max(1, said.length / LONG);
  const due = isMore ? wroteAt + pause : 0;
  writing = setTimeout(write, Math.max(0, due - performance.now()));
}

function write() {
  clearTimeout(writing);
  writing = 0;
  wroteAt = performance.now();
  handed = said;
  page.said = inert(said); // where the event finds it
  trigger("write");
}

// Drawing the text as Markdown is dear: in between it grows by the bare words, in its last block.
function addBare() {
  const block = document.querySelector("#live-text .md")?.lastElementChild;
  const rest = said.startsWith(drawn) ? said.slice(drawn.length) : "";
  if (!block || !rest) bare.remove();
  else {
    const last = lastText(block);
    if (last && last.nextSibling !== bare) last.after(bare);
    if (!rest.startsWith(bare.data)) bare.data = rest;
    else if (rest !== bare.data) bare.appendData(rest.slice(bare.length)); // a selection in it stays
  }
  redrawn.takeRecords();
}

function lastText(block) {
  const texts = document.createTreeWalker(block, NodeFilter.SHOW_TEXT, (node) =>
    node !== bare && /\S/.test(node.data) ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP,
  );
  let last = null;
  while (texts.nextNode()) last = texts.currentNode;
  return last?.parentElement.closest(".katex, button") ? null : last;
}
