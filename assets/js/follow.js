// The answer that runs, read from a stream of its own: what comes through Gradio's queue has it
// compare every property of every output. Each part goes to the block that draws it; the end of
// the stream is told to all of them, and then this tab looks at what became of the answer.
const PAUSE = 700; // ms before it is tried again after a stream that broke
const SILENT = 10_000; // ms without a byte, twenty of which are sent meanwhile: it is a dead one
const WRITE_EVERY = 250; // ms between two drawings of the text as Markdown
const LONG = 4000; // characters from which they come less often
const bare = document.createTextNode(""); // what is said, but not drawn as Markdown yet
const redrawn = new MutationObserver(() => {
  drawn = handed;
  addBare();
});
let isFollowing = false;
let following = null; // what ends the stream
let silence = 0; // the timer of that
let said = "";
let handed = ""; // what there was of it when it was last handed to be drawn
let drawn = ""; // what is drawn of it
let writing = 0; // the timer of the next one
let wroteAt = 0;

async function follow(key) {
  if (isFollowing) return;
  isFollowing = true;
  let isWhole = false;
  following = new AbortController();
  hear();
  try {
    const root = ((window.gradio_config || {}).root || "").replace(/\/$/, "");
    const headers = { "x-medusa-tab": key };
    const { signal } = following;
    const answer = await fetch(`${root}/live`, { headers, signal, cache: "no-store" });
    if (answer.ok) isWhole = await read(answer.body.getReader());
  } catch {
    // the connection is gone, or was ended: what is there now is looked at below
  }
  clearTimeout(silence);
  isFollowing = false;
  tell("medusa-end");
  endReel();
  if (!isWhole) await new Promise((done) => setTimeout(done, PAUSE));
  trigger(isWhole ? "refresh" : "redraw"); // the server may not know yet that it broke
}

function hear() {
  clearTimeout(silence);
  silence = setTimeout(() => following.abort(), SILENT);
}

// true when the stream came to its end.
async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  [said, handed, drawn] = ["", "", ""];
  const prose = document.getElementById("live-text");
  redrawn.observe(prose, { childList: true, characterData: true, subtree: true });
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return true;
      hear();
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
  } finally {
    redrawn.disconnect();
    bare.remove();
    write();
  }
}

function take(update) {
  if ("refresh" in update) trigger("refresh");
  if ("show" in update) return takeShown(update);
  if (reel) return;
  if ("live" in update) tell("medusa-lines", update.live);
  if ("panel" in update) tell("medusa-panel", update.panel);
  if ("text" in update) setSaid(update.text);
  else if ("more" in update) setSaid(said + update.more);
}

// What is shown one by one goes by the reel; of the lines only what is no text and no reasoning.
function takeShown({ show, panel, live }) {
  const lines = (live || "").split("\n").filter((line) => /^{(?!"thought")/.test(line));
  if (lines.length) tell("medusa-lines", `${lines.join("\n")}\n`);
  if (panel && reel?.answer === show.answer) reel.panel = panel;
  else if (panel) {
    beginReel(show);
    reel.panel = panel;
  }
  takeReel(show);
}

function setSaid(text) {
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
  window.medusaSaid = inert(said); // where the event finds it
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
  return last && last.parentElement.closest(".katex, button") ? null : last;
}

function tell(name, detail) {
  window.dispatchEvent(new CustomEvent(name, { detail }));
}

