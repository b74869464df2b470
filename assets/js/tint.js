// Text tinted by the tokens that came in one step, with the CSS Custom Highlight API: the DOM stays
// as it is, so a copy is clean. The value says which rows of the conversation have pieces, and
// brings the pieces this tab does not have: {"rows": [[row, key]], "new": {key: [tokens, text]}}.
const KEY = "medusa-chat-tint";
const LEVELS = 5; // the last one: that many or more
const MARKUP = new Set("*_`~#>|[]()!\\-:=+");
const LINK = /!\[[^\]]*\]\([^)]*\)|(?<=\])\((?:[^()\s]|\([^()\s]*\))*(?:\s+"[^"]*")?\)/g;
const NEEDS = [6, 3]; // characters in a row that must agree before anything else is skipped
const AHEAD = 4000;

const root = element.querySelector(".tint-block") || element;
const label = document.createElement("label");
const box = document.createElement("input");
const legend = document.createElement("span");
box.type = "checkbox";
box.id = "tint-switch";
label.append(box, document.createTextNode("Colour by tokens per step"));
legend.className = "tint-legend";
for (let n = 1; n <= LEVELS; n++) {
  const mark = document.createElement("span");
  mark.className = `tint-${n}`;
  mark.textContent = n < LEVELS ? n : `${n}+`;
  mark.title = `${mark.textContent} token${n > 1 ? "s" : ""} in one step`;
  legend.append(mark);
}
root.replaceChildren(label, legend);
legend.setAttribute("aria-hidden", "true");

const has = typeof Highlight === "function" && CSS.highlights;
const levels = [];
const known = new Map(); // key -> pieces
const drawn = new Map(); // an element -> {ranges, key, size} of its tint
let rows = [];
let livePieces = [];
let liveSplit = null;
let liveAt = 0;
let liveCost = 0;
let scheduled = false;

for (let n = 1; n <= LEVELS && has; n++) {
  levels[n] = new Highlight();
  CSS.highlights.set(`tokens-${n}`, levels[n]);
}

// ---- raw text against what is drawn of it ----

// The characters that can be drawn, [character, tokens] in two lists; space and line markup out.
function characters(pieces) {
  let text = "";
  const at = [];
  for (let i = 0; i < pieces.length; i += 2) {
    for (let k = 0; k < pieces[i + 1].length; k++) at.push(pieces[i]);
    text += pieces[i + 1];
  }
  const chars = [];
  const tokens = [];
  let start = 0;
  let fence = "";
  for (const line of text.split("\n")) {
    const mark = /^\s*(`{3,}|~{3,})/.exec(line);
    let from = 0;
    if (mark && (!fence || mark[1].startsWith(fence))) {
      fence = fence ? "" : mark[1];
      from = line.length;
    } else if (!fence && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(line) && /-/.test(line)) {
      from = line.length;
    } else if (!fence) {
      from = /^(\s*>)*\s*(#{1,6}\s|[-*+]\s+(\[[ xX]\]\s)?|\d{1,9}[.)]\s)?/.exec(line)[0].length;
    }
    const ends = fence || mark ? [] : [...line.matchAll(LINK)];
    for (let k = from; k < line.length; k++) {
      if (ends.length && k === ends[0].index) k += ends.shift()[0].length;
      if (k >= line.length || /\s/.test(line[k])) continue;
      chars.push(line[k]);
      tokens.push(at[start + k]);
    }
    start += line.length + 1;
  }
  return [chars, tokens];
}

// Whether what is drawn from r on may begin at raw character w; markup in between is no matter.
function fits(shown, r, chars, w, need) {
  let same = 0;
  while (same < need && r < shown.length) {
    if (w >= chars.length) return false;
    if (chars[w] === shown[r]) {
      r++;
      w++;
      same++;
    } else if (same && MARKUP.has(chars[w])) w++;
    else return false;
  }
  return same > 0;
}

// Where in the raw text drawn character r is, from w on: past markup, else where the most of what
// follows agrees; -1 when it is not there.
function place(shown, r, chars, w) {
  let at = w;
  while (at < chars.length && chars[at] !== shown[r] && MARKUP.has(chars[at])) at++;
  if (chars[at] === shown[r]) return at;
  const last = Math.min(chars.length, w + AHEAD);
  for (const need of NEEDS) {
    for (at = w; at < last; at++) if (fits(shown, r, chars, at, need)) return at;
  }
  return -1;
}

// For each drawn character the tokens of its step; 0 where it is not in the raw text.
function align(shown, chars, tokens) {
  const found = new Array(shown.length).fill(0);
  let w = 0;
  for (let r = 0; r < shown.length; r++) {
    const at = place(shown, r, chars, w);
    if (at < 0) continue;
    found[r] = tokens[at];
    w = at + 1;
  }
  return found;
}

function textNodes(target) {
  const nodes = [];
  const walker = document.createTreeWalker(target, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement.closest("button, .katex, .answer-note, [aria-hidden=true]")
      ? NodeFilter.FILTER_REJECT
      : NodeFilter.FILTER_ACCEPT,
  );
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return nodes;
}

// Ranges of one element: as few as there are changes of level within each text node.
function tinted(target, pieces) {
  const nodes = textNodes(target);
  const shown = [];
  for (const node of nodes) for (const c of node.data.split("")) if (/\S/.test(c)) shown.push(c);
  const [chars, tokens] = characters(pieces);
  const found = align(shown, chars, tokens);
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

function range(node, from, to) {
  const made = new Range();
  made.setStart(node, from);
  made.setEnd(node, to);
  return made;
}

// ---- what is tinted now ----

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
  scheduled = false;
  if (!has) return;
  const wanted = new Set();
  if (box.checked) {
    const all = document.querySelectorAll("#history .message-row");
    for (const [row, key] of rows) {
      const target = all[row]?.querySelector(".message-content");
      if (!target || !known.has(key)) continue;
      wanted.add(target);
      tint(target, key, known.get(key));
    }
    drawLive(wanted);
  }
  for (const target of [...drawn.keys()]) if (!wanted.has(target)) wipe(target);
}

// The text that comes is drawn anew at each update: its tint may take a tenth of the time.
function drawLive(wanted) {
  const target = document.querySelector("#live-text .md");
  if (!target || !livePieces.length || !target.textContent) return;
  wanted.add(target);
  const start = performance.now();
  if (start < liveAt + 9 * liveCost) {
    setTimeout(schedule, 9 * liveCost);
    return;
  }
  tint(target, "live", livePieces);
  liveAt = performance.now();
  liveCost = liveAt - start;
}

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(draw);
}

// ---- the answer whose steps are shown ----

let shownAnswer = null;

function mark() {
  const keys = new Map(rows);
  document.querySelectorAll("#history .message-row").forEach((row, place) => {
    const isShown = Number((keys.get(place) || "").split(".")[0]) === shownAnswer;
    if (row.classList.contains("is-shown") !== isShown) row.classList.toggle("is-shown", isShown);
  });
}

window.addEventListener("medusa-answer", (event) => {
  shownAnswer = event.detail;
  mark();
});

// ---- what comes in ----

function take() {
  const value = props.value || "";
  if (!value) return;
  const line = JSON.parse(value);
  for (const key in line.new) known.set(key, line.new[key]);
  rows = line.rows;
  showTyped(line.typed || []);
  schedule();
  requestAnimationFrame(mark);
}

function remember() {
  try {
    localStorage.setItem(KEY, box.checked ? "on" : "off");
  } catch {
    // a browser that keeps nothing still tints
  }
}

function recall() {
  try {
    return localStorage.getItem(KEY) === "on";
  } catch {
    return false;
  }
}

function show() {
  root.dataset.on = String(box.checked);
  schedule();
}

box.disabled = !has;
if (!has) label.title = "this browser cannot tint text without changing it";
box.checked = Boolean(has) && recall();
box.addEventListener("change", () => {
  remember();
  show();
});
window.addEventListener("medusa-live", (event) => {
  livePieces = saidOnly(event.detail);
  if (box.checked) schedule();
});
watch("value", take);
take();
show();

// Pieces without what was thought aloud.
function saidOnly({ pieces, split }) {
  let text = "";
  for (let i = 1; i < pieces.length; i += 2) text += pieces[i];
  if (!text.includes("<think>") && !text.includes("</think>")) return pieces;
  let rest = split(text)[0].length;
  const kept = [];
  for (let i = pieces.length - 2; i >= 0 && rest > 0; i -= 2) {
    kept.unshift(pieces[i], pieces[i + 1].slice(-rest));
    rest -= pieces[i + 1].length;
  }
  return kept;
}

const talk = document.getElementById("talk");
if (talk) {
  new MutationObserver(() => {
    if (has && box.checked) schedule();
    mark();
  }).observe(talk, {
    childList: true,
    subtree: true,
    characterData: true,
  });
}
