// The answer while it is written. The value is JSON lines that only grow: a list is pieces of
// text, [tokens, text, tokens, text ...]; {"thought": s} more of what the model thinks, which is no
// part of the text; {"status": s} what happens before there is either;
// {"error": s} why nothing comes; {"news": s} what is no fault; {"done": s} all that was said, once it is over. The rendered text has a block of its own; this one shows the
// status and what the model thinks, hands the pieces to the tint, and says finished sentences to
// a screen reader, once each.
import { blockOf } from "./block.js";
import { inNextFrame, make, whenDrawn, withRole } from "./elements.js";
import { scrollWith } from "./scroll.js";

const { root, watch, value, setValue } = blockOf("live");
const SAY_EVERY = 1200; // ms between two announcements: a voice is slower than a model
const SENTENCE = /[.!?…](?=["')\]]*\s)|[。！？]|\n/g;

const thought = make("details", "live-thought");
const summary = make("summary", "", "Thinking …");
const reasoning = make("div", "live-reasoning");
const status = withRole(make("div", "live-status"), "status");
const error = withRole(make("div", "live-error"), "alert");
const news = withRole(make("div", "live-news"), "status");
const voice = make("div", "visually-hidden");
voice.id = "voice";
voice.setAttribute("aria-live", "polite");
thought.hidden = true;
thought.append(summary, reasoning);
root.replaceChildren(thought, status, error, news, voice);

let read = "";
let pieces = [];
let whole = ""; // the text so far
let inner = ""; // the reasoning so far
let heard = ""; // the part of the text that was said
let saidAt = 0;
let isOver = false; // the whole answer was said: what comes next is another one
let isBusy = false;
const drawSoon = inNextFrame(draw);

function scrollBox() {
  return root.closest("#conversation");
}

function think(isOpen) {
  const isHidden = !inner.trim();
  if (thought.hidden !== isHidden) thought.hidden = isHidden;
  if (isHidden) return;
  summary.textContent = isOpen ? "Thinking …" : "Thought";
  if (reasoning.textContent !== inner) reasoning.textContent = inner;
}

// Whole sentences only, and the rest when the answer is over. A stream that begins anew says nothing
// again, and the end may have been trimmed: spaces, or what looked like the begin of a thought.
function announce(said, isEnd) {
  if (!isEnd && performance.now() < saidAt + SAY_EVERY) return;
  if (heard.startsWith(said.trimEnd())) return;
  if (!said.startsWith(heard)) heard = "";
  let end = isEnd ? said.length : heard.length;
  for (const match of isEnd ? [] : said.slice(heard.length).matchAll(SENTENCE)) {
    end = heard.length + match.index + match[0].length;
  }
  const text = said.slice(heard.length, end).replace(/[*`#|]+|\b_+\B|\B_+\b/g, "").trim();
  heard = said.slice(0, end);
  if (!text) return;
  saidAt = performance.now();
  voice.append(make("p", "", text));
  while (voice.childElementCount > 40) voice.firstChild.remove();
}

function reset() {
  read = "";
  pieces = [];
  whole = "";
  inner = "";
  status.textContent = "";
  error.textContent = "";
  news.textContent = "";
}

// What is new in the value, at once: the next one may replace it within the same frame.
function take(value) {
  if (!value.startsWith(read) || (read && !value)) reset();
  const end = value.lastIndexOf("\n") + 1;
  for (const line of value.slice(read.length, end).split("\n")) {
    if (!line) continue;
    const item = JSON.parse(line);
    if (Array.isArray(item)) {
      if (isOver) heard = "";
      isOver = false;
      pieces.push(...item);
      for (let at = 1; at < item.length; at += 2) whole += item[at];
    } else if ("thought" in item) inner += item.thought;
    else if ("status" in item) status.textContent = item.status;
    else if ("error" in item) error.textContent = item.error;
    else if ("news" in item) news.textContent = item.news;
    else if ("done" in item) {
      announce(item.done, true); // an answer may be over before any of it was seen here
      isOver = true;
    }
  }
  read = value.slice(0, end);
  isBusy = Boolean(pieces.length || inner || status.textContent);
  if (whole) announce(whole, false);
  drawSoon();
}

function draw() {
  const box = scrollBox();
  think(!whole);
  const busy = String(isBusy);
  if (root.dataset.busy !== busy) {
    root.dataset.busy = busy;
    box?.setAttribute("data-busy", busy);
  }
  window.dispatchEvent(new CustomEvent("medusa-live", { detail: { pieces } }));
  if (box && (error.textContent || news.textContent)) box.scrollTop = box.scrollHeight;
}

watch(() => take(value()));
take(value());

// While an answer runs its lines come from its stream (follow.js); at the end they are the value,
// so that whatever replaces it is a change.
let lines = "";
window.addEventListener("medusa-lines", (event) => take((lines += event.detail)));
window.addEventListener("medusa-end", () => {
  if (lines) setValue(lines);
  lines = "";
});

const conversation = scrollBox();
if (conversation) {
  scrollWith(conversation);
  // The region above says each sentence once: the log must not read the whole answer again.
  const quiet = () => {
    for (const node of conversation.querySelectorAll("#history [aria-live]:not([aria-live=off])")) {
      node.setAttribute("aria-live", "off");
    }
  };
  whenDrawn("history", quiet);
  quiet();
}

// Blocks of code get a label with their language, where the answer names one. It is drawn by a style
// sheet from an attribute: what is copied, selected or tinted of an answer has no word of it.
function labelCode(id) {
  const label = () => {
    const fresh = document.querySelectorAll(`#${id} .code_wrap:not([data-language]) code[class]`);
    for (const code of fresh) {
      const name = /(?:^|\s)language-(\S+)/.exec(code.className)?.[1] ?? "";
      code.closest(".code_wrap").dataset.language = name;
    }
  };
  whenDrawn(id, label);
  label();
}

// Gradio's own copy has lost the first line's indentation.
const COPIED = 2000; // ms that it says so
document.addEventListener(
  "click",
  async (event) => {
    const copy = event.target.closest?.(".copy_code_button");
    if (!copy || !navigator.clipboard) return; // there is none without HTTPS: Gradio does what it can
    event.stopPropagation();
    await navigator.clipboard.writeText(copy.parentElement.querySelector("code").textContent.trimEnd());
    const done = copy.querySelector(".check");
    done.style.opacity = "1";
    setTimeout(() => (done.style.opacity = "0"), COPIED);
  },
  true,
);

labelCode("history");
labelCode("live-text");
