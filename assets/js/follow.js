// The answer that runs, read from a stream of its own: what comes through Gradio's queue has it
// compare every property of every output. Each part goes to the block that draws it; the end of
// the stream is told to all of them, and then this tab looks at what became of the answer.
import { blockOf } from "./block.js";
import { pagePath, tell } from "./page.js";
import { addSaid, beginSaid, endSaid, setSaid } from "./said.js";
import { endReel, isReeling, setReelPanel, takeReel } from "./show.js";

const { trigger } = blockOf("next");
const PAUSE = 700; // ms before it is tried again after a stream that broke
const SILENT = 10_000; // ms without a byte, twenty of which are sent meanwhile: it is a dead one
export const stream = { isOpen: false, ends: null }; // ends: what ends it
let silence = 0; // the timer of that

export async function follow(key) {
  if (stream.isOpen) return;
  stream.isOpen = true;
  let isWhole = false;
  stream.ends = new AbortController();
  hear();
  try {
    const headers = { "x-medusa-tab": key };
    const { signal } = stream.ends;
    const answer = await fetch(`${pagePath()}/live`, { headers, signal, cache: "no-store" });
    if (answer.ok) isWhole = await read(answer.body.getReader());
  } catch {
    // the connection is gone, or was ended: what is there now is looked at below
  }
  clearTimeout(silence);
  stream.isOpen = false;
  tell("medusa-end");
  endReel();
  if (!isWhole) await new Promise((done) => setTimeout(done, PAUSE));
  trigger(isWhole ? "refresh" : "redraw"); // the server may not know yet that it broke
}

function hear() {
  clearTimeout(silence);
  silence = setTimeout(() => stream.ends.abort(), SILENT);
}

// true when the stream came to its end.
async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  beginSaid();
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
    endSaid();
  }
}

function take(update) {
  if ("refresh" in update) trigger("refresh");
  if ("show" in update) return takeShown(update);
  if (isReeling()) return;
  if ("live" in update) tell("medusa-lines", update.live);
  if ("panel" in update) tell("medusa-panel", update.panel);
  if ("text" in update) setSaid(update.text);
  else if ("more" in update) addSaid(update.more);
}

// What is shown one by one goes by the reel; of the lines only what is no text and no reasoning.
function takeShown({ show, panel, live }) {
  const lines = (live || "").split("\n").filter((line) => /^{(?!"thought")/.test(line));
  if (lines.length) tell("medusa-lines", `${lines.join("\n")}\n`);
  if (panel) setReelPanel(show, panel);
  takeReel(show);
}
