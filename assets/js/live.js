// The answer while it is written. The value is JSON lines that only grow: a list is pieces of
// text, [tokens, text, tokens, text ...]; {"status": s} what happens before there is text;
// {"error": s} why nothing comes; {"done": s} all that was said, once it is over. The rendered text has a block of its own; this one shows the
// status and what the model thinks, hands the pieces to the tint, and says finished sentences to
// a screen reader, once each.
const SAY_EVERY = 1200; // ms between two announcements: a voice is slower than a model
const SENTENCE = /[.!?…](?=["')\]]*\s)|[。！？]|\n/g;

const root = element.querySelector(".live-block") || element;
const thought = make("details", "live-thought");
const summary = make("summary", "", "Thinking …");
const thoughts = make("div", "live-thoughts");
const status = withRole(make("div", "live-status"), "status");
const error = withRole(make("div", "live-error"), "alert");
const voice = make("div", "visually-hidden");
voice.id = "voice";
voice.setAttribute("aria-live", "polite");
thought.hidden = true;
thought.append(summary, thoughts);
root.replaceChildren(thought, status, error, voice);

let read = "";
let pieces = [];
let whole = ""; // the text so far
let spoken = 0; // characters of it, thoughts left out, that were said
let saidAt = 0;
let told = ""; // what was said of the answer before
let isBusy = false;
let scheduled = false;

function scrollBox() {
  return element.closest("#talk");
}

function think(inner, isOpen) {
  const isHidden = !inner.trim();
  if (thought.hidden !== isHidden) thought.hidden = isHidden;
  if (isHidden) return;
  summary.textContent = isOpen ? "Thinking …" : "Thought";
  if (thoughts.textContent !== inner) thoughts.textContent = inner;
}

// Whole sentences only, and the rest when the answer is over.
function announce(said, isOver) {
  if (!isOver && performance.now() < saidAt + SAY_EVERY) return;
  let end = isOver ? said.length : spoken;
  for (const match of isOver ? [] : said.slice(spoken).matchAll(SENTENCE)) {
    end = spoken + match.index + match[0].length;
  }
  const text = said.slice(spoken, end).replace(/[*_`#|]+/g, "").trim();
  spoken = end;
  if (!text) return;
  saidAt = performance.now();
  voice.append(make("p", "", text));
  while (voice.childElementCount > 40) voice.firstChild.remove();
}

// An answer may be over before any of it was seen here: it is said all the same.
function finish(text) {
  // the end may have been trimmed: spaces, or what looked like the begin of a thought
  const rest = told.startsWith(text.trimEnd()) ? "" : text.startsWith(told) ? text.slice(told.length) : text;
  told = text; // told again, it is not said again
  spoken = 0;
  announce(rest, true);
}

function reset() {
  const [said] = split(whole);
  if (whole) {
    announce(said, true);
    told = said;
  }
  read = "";
  pieces = [];
  whole = "";
  spoken = 0;
  status.textContent = "";
  error.textContent = "";
}

// What is new in the value, at once: the next one may replace it within the same frame.
function take(value) {
  if (!value.startsWith(read) || (read && !value)) reset();
  const end = value.lastIndexOf("\n") + 1;
  for (const line of value.slice(read.length, end).split("\n")) {
    if (!line) continue;
    const item = JSON.parse(line);
    if (Array.isArray(item)) {
      pieces.push(...item);
      for (let at = 1; at < item.length; at += 2) whole += item[at];
    } else if ("status" in item) status.textContent = item.status;
    else if ("error" in item) error.textContent = item.error;
    else if ("done" in item) finish(item.done);
  }
  read = value.slice(0, end);
  isBusy = Boolean(pieces.length || status.textContent);
  if (whole) announce(split(whole)[0], false);
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(draw);
}

function draw() {
  scheduled = false;
  const box = scrollBox();
  const [, inner, isThinking] = split(whole);
  think(inner, isThinking);
  const busy = String(isBusy);
  if (root.dataset.busy !== busy) {
    root.dataset.busy = busy;
    box?.setAttribute("data-busy", busy);
  }
  window.dispatchEvent(new CustomEvent("medusa-live", { detail: { pieces, split } }));
  if (box && error.textContent) box.scrollTop = box.scrollHeight;
}

watch("value", () => take(props.value || ""));
take(props.value || "");

// While an answer runs its lines come from its stream (follow.js); at the end they are the value,
// so that whatever replaces it is a change.
let lines = "";
window.addEventListener("medusa-lines", (event) => take((lines += event.detail)));
window.addEventListener("medusa-end", () => {
  if (lines) props.value = lines;
  lines = "";
});

const talk = scrollBox();
if (talk) {
  scrollWith(talk);
  // The region above says each sentence once: the log must not read the whole answer again.
  const quiet = () => {
    for (const node of talk.querySelectorAll("#history [aria-live]:not([aria-live=off])")) {
      node.setAttribute("aria-live", "off");
    }
  };
  new MutationObserver(quiet).observe(talk, { childList: true, subtree: true });
  quiet();
}
