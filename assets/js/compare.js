// Two recordings of one prompt, replayed in two columns on one clock. The value is one JSON
// object: what runs now, or the last result. Model text is written with appendData only, so that
// a frame costs what is new and not what is there.
const SPEEDS = [[1, "1×"], [0.5, "½×"], [0.25, "¼×"]];
const NOTCHES = 200; // of the scrubber
const CHUNK = 2000; // characters after which a new line begins a new block
const root = element.querySelector(".compare-block") || element;
const still = matchMedia("(prefers-reduced-motion: reduce)");

let seen = null;
let result = null;
let lanes = [];
let at = 0; // milliseconds on the replay's clock
let end = 0;
let speed = 1;
let playing = false;
let before = 0; // time stamp of the last frame

function seconds(ms) {
  return `${(ms / 1000).toFixed(2)} s`;
}

function time(ms) {
  if (ms === null) return "–";
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 2 : 0)} ms` : seconds(ms);
}

// ---- the fixed parts ----

const spoken = make("p", "compare-spoken"); // for screen readers: a sentence when there is news
const fault = make("p", "compare-error");
const status = make("p", "compare-status");
const track = make("div", "lanes");
const controls = make("div", "replay");
const facts = make("div", "compare-facts");
const hollow = make(
  "p",
  "hollow",
  "No comparison yet. Run both: the prompt is answered by plain decoding and with Medusa, one " +
    "after the other, and both recordings are replayed here on one clock.",
);
const play = button("play", "Play", () => (playing ? pause() : start()));
const again = button("again", "Restart", () => {
  seek(0);
  start();
});
const speeds = make("div", "speeds");
const scrub = make("input", "scrub");
const clock = make("span", "clock");
spoken.setAttribute("role", "status");
fault.setAttribute("role", "alert");
scrub.type = "range";
scrub.max = NOTCHES;
scrub.setAttribute("aria-label", "Time of the replay");
scrub.addEventListener("input", () => {
  pause();
  seek((scrub.value / NOTCHES) * end);
});
for (const [factor, label] of SPEEDS) {
  const choice = button("speed", label, () => setSpeed(factor));
  choice.dataset.speed = factor;
  choice.setAttribute("aria-label", `Speed ${label}`);
  speeds.append(choice);
}
speeds.setAttribute("role", "group");
speeds.setAttribute("aria-label", "Speed of the replay");
controls.setAttribute("role", "group");
controls.setAttribute("aria-label", "Replay");
controls.append(play, again, speeds, scrub, clock);
root.replaceChildren(spoken, fault, status, track, controls, facts, hollow);

// ---- lanes ----

function makeLane(name, key) {
  const box = make("section", "lane");
  const head = make("div", "lane-head");
  const lane = { box, frames: [], part: [Infinity, Infinity] };
  lane.flag = make("span", "flag");
  lane.count = make("span", "lane-count");
  lane.bar = make("progress", "lane-bar");
  lane.text = make("div", "lane-text");
  lane.bar.max = 1;
  lane.bar.value = 0;
  lane.bar.setAttribute("aria-label", `${name}: progress`);
  lane.text.tabIndex = 0;
  lane.text.setAttribute("role", "region");
  lane.text.setAttribute("aria-label", `${name}: text`);
  box.dataset.side = key;
  head.append(make("h3", "", name), lane.flag, lane.count);
  box.append(head, lane.bar, lane.text);
  return lane;
}

function setLanes(made) {
  lanes = made;
  track.replaceChildren(...lanes.map((lane) => lane.box));
}

// A lane's recording, with the tokens and the time of every frame summed up.
function record(side) {
  const lane = makeLane(side.name, side.key);
  let tokens = 0;
  lane.side = side;
  lane.frames = side.frames;
  lane.tokens = side.frames.map((frame) => (tokens += frame[2]));
  empty(lane);
  return lane;
}

function empty(lane) {
  lane.text.replaceChildren();
  lane.done = 0; // frames that are shown
  lane.shown = 0; // characters
  lane.tail = null; // the text node that grows
  lane.chunk = null;
  lane.room = 0;
}

// Where the texts part, as [from, to] of the token in each: what is marked.
function markParting() {
  if (!result.difference) return;
  const texts = lanes.map((lane) => lane.frames.map((frame) => frame[1]).join(""));
  const [one, two] = texts;
  let same = 0;
  while (same < one.length && one[same] === two[same]) same++;
  lanes.forEach((lane, which) => {
    const token = result.difference.raw[which];
    let from = same;
    while (from > 0 && same - from < token.length && !texts[which].startsWith(token, from)) from--;
    const isThere = texts[which].startsWith(token, from) && from + token.length > same;
    lane.part = isThere ? [from, from + token.length] : [same, same + 1];
  });
}

function put(lane, piece, isMarked) {
  const line = piece.indexOf("\n", Math.max(0, lane.room)) + 1;
  if (line && line < piece.length) {
    put(lane, piece.slice(0, line), isMarked);
    put(lane, piece.slice(line), isMarked);
    return;
  }
  if (!lane.chunk || (lane.room < 0 && lane.endsLine)) {
    lane.chunk = lane.text.appendChild(make("div", "lane-chunk"));
    lane.room = CHUNK;
    lane.tail = null;
  }
  if (!lane.tail || lane.isMarked !== isMarked) {
    lane.tail = document.createTextNode("");
    lane.isMarked = isMarked;
    const home = isMarked ? lane.chunk.appendChild(make("mark", "differs")) : lane.chunk;
    home.append(lane.tail);
  }
  lane.tail.appendData(piece);
  lane.room -= piece.length;
  lane.endsLine = piece.endsWith("\n");
}

function write(lane, text) {
  const [from, to] = lane.part;
  while (text) {
    const isMarked = lane.shown >= from && lane.shown < to;
    const edge = lane.shown < from ? from : isMarked ? to : Infinity;
    const piece = text.slice(0, edge - lane.shown);
    put(lane, piece, isMarked);
    lane.shown += piece.length;
    text = text.slice(piece.length);
  }
}

function show(lane) {
  const { frames, side } = lane;
  if (lane.done && frames[lane.done - 1][0] > at) empty(lane);
  let text = "";
  const first = lane.done;
  while (lane.done < frames.length && frames[lane.done][0] <= at) text += frames[lane.done++][1];
  const box = lane.text;
  const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  write(lane, text);
  if (follow && lane.done > first) box.scrollTop = box.scrollHeight;
  const isOver = at >= side.total_ms;
  const tokens = lane.done ? lane.tokens[lane.done - 1] : 0;
  const decoded = at - side.first_ms;
  const rate = isOver ? side.rate : decoded > 0 ? ((tokens - 1) / decoded) * 1000 : null;
  say(lane.count, `${tokens} tokens · ${number(rate, rate < 10 ? 1 : 0)} tokens/s`);
  say(lane.flag, isOver ? flagOf(side) : "");
  lane.bar.value = side.tokens ? tokens / side.tokens : 1;
  lane.box.classList.toggle("is-over", isOver);
}

function flagOf(side) {
  const other = result.sides.find((one) => one !== side);
  if (side.total_ms >= other.total_ms) return "finished";
  if (!result.is_same_length) return "⚑ finished first";
  return `⚑ finished first, ${(other.total_ms / side.total_ms).toFixed(1)}× faster`;
}

// ---- the clock ----

function draw() {
  lanes.forEach(show);
  scrub.value = end ? Math.round((at / end) * NOTCHES) : 0;
  scrub.setAttribute("aria-valuetext", `${seconds(at)} of ${seconds(end)}`);
  say(clock, `${seconds(at)} of ${seconds(end)}`);
}

function tick(now) {
  if (!playing || !root.isConnected) return;
  at = Math.min(end, at + Math.max(0, now - before) * speed);
  before = now;
  draw();
  if (at >= end) pause();
  else requestAnimationFrame(tick);
}

function start() {
  if (still.matches || !lanes.length) return;
  if (at >= end) seek(0);
  playing = true;
  before = performance.now();
  say(play, "Pause");
  requestAnimationFrame(tick);
}

function pause() {
  playing = false;
  say(play, at >= end ? "Play again" : "Play");
}

function seek(ms) {
  at = Math.min(end, Math.max(0, ms));
  draw();
  if (!playing) say(play, at >= end ? "Play again" : "Play");
}

function setSpeed(factor) {
  speed = factor;
  for (const choice of speeds.children) {
    choice.setAttribute("aria-pressed", String(Number(choice.dataset.speed) === speed));
  }
}

function obeyMotion() {
  for (const node of [play, again, speeds]) node.hidden = still.matches;
  if (still.matches && playing) {
    pause();
    seek(end);
  }
}

// ---- the figures ----

const ROWS = [
  ["tokens/s", (side) => number(side.rate, 1)],
  ["time to first token", (side) => time(side.first_ms)],
  ["total time", (side) => time(side.total_ms)],
  ["tokens", (side) => String(side.tokens)],
  ["steps", (side) => String(side.steps)],
  ["tokens per step", (side) => number(side.per_step, 2)],
  ["ms per step", (side) => number(side.step_ms, 2)],
  ["end", (side) => side.end],
];

function table() {
  const box = make("table", "compare-table");
  const head = box.createTHead().insertRow();
  box.createCaption().textContent = "Figures of both runs";
  for (const name of ["", ...result.sides.map((side) => side.name)]) {
    const cell = make(name ? "th" : "td", "", name);
    if (name) cell.scope = "col";
    head.append(cell);
  }
  const body = box.createTBody();
  for (const [label, of] of ROWS) {
    const row = body.insertRow();
    const name = make("th", "", label);
    name.scope = "row";
    row.append(name, ...result.sides.map((side) => make("td", "", of(side))));
  }
  return box;
}

function term(value, label) {
  const box = make("span", "term");
  box.append(make("b", "", value), make("span", "label", label));
  return box;
}

function equation() {
  const box = make("div", "equation");
  const rate = `${number(result.acceleration_rate, 2)}`;
  box.append(
    term(`${number(result.speedup, 2)}×`, "speedup"),
    make("span", "sign", "="),
    term(rate, "acceleration rate (tokens per step)"),
    make("span", "sign", "/"),
    term(number(result.overhead, 2), "overhead (tree step / plain step)"),
  );
  return box;
}

function ratios() {
  const wall = `Wall-clock ratio of the decoding: ${number(result.wall_clock_ratio, 2)}×`;
  const whole = `with time to first token: ${number(result.total_ratio, 2)}×.`;
  const lengths = result.is_same_length
    ? ""
    : " The answers differ in length: the speedup is per token, these ratios are of whole answers.";
  return `${wall}; ${whole}${lengths}`;
}

function badge() {
  if (result.identical) {
    return make("p", "badge identical", `✓ identical: all ${result.tokens} tokens`);
  }
  const { index, tokens, gap, note } = result.difference;
  const box = make("p", "badge different");
  const names = result.sides.map((side) => side.name);
  box.append(make("b", "", `≠ first difference at token ${index + 1}: `));
  tokens.forEach((token, which) => {
    box.append(`${which ? ", " : ""}${names[which]} `, make("code", "", token));
  });
  box.append(gap ? `. Gap: ${gap}. ` : ". ", note);
  box.append(button("show", "show it in both texts", showParting));
  return box;
}

function showParting() {
  pause();
  seek(end);
  for (const { text } of lanes) {
    const mark = text.querySelector(".differs");
    if (mark) text.scrollTop += mark.getBoundingClientRect().top - text.getBoundingClientRect().top - 40;
  }
  track.scrollIntoView({ block: "nearest" });
}

function drawFacts() {
  const verdict = make("p", "compare-verdict", result.verdict);
  verdict.classList.toggle("slower", result.is_slower);
  const notes = make("p", "compare-notes", `Against ${result.baseline}. ${ratios()}`);
  facts.replaceChildren(verdict, badge(), equation(), notes, table());
  facts.append(make("p", "compare-notes", result.how));
}

// ---- the value ----

function drawRunning(now) {
  pause();
  result = null;
  if (lanes.length !== 2 || lanes[0].side) {
    setLanes([makeLane("Plain", "plain"), makeLane("With the drafter", "drafted")]);
  }
  const isFirst = { plain: now.place === 1, drafted: now.place === 1 };
  const rate = now.rate && now.stage === "running" ? `, ${number(now.rate, 0)} tokens/s` : "";
  const count = now.tokens ? ` ${now.tokens} tokens${rate}` : "";
  say(status, `${now.status}${count}`);
  for (const lane of lanes) {
    const isNow = lane.box.dataset.side === now.side && now.stage === "running";
    const isDone = now.stage === "running" && !isNow && !isFirst[lane.box.dataset.side];
    if (isNow) lane.bar.value = now.tokens / now.limit;
    else lane.bar.value = isDone ? 1 : 0;
    say(lane.count, isNow ? `${now.tokens} tokens` : isDone ? "recorded" : "waits for its turn");
  }
  if (now.spoken) say(spoken, now.spoken);
}

function drawResult(found, isNew) {
  result = found;
  root.dataset.race = found.number;
  end = Math.max(...result.sides.map((side) => side.total_ms));
  setLanes(result.sides.map(record));
  markParting();
  drawFacts();
  seek(isNew && !still.matches ? 0 : end);
  if (!isNew) return;
  const same = result.identical ? "Both texts are identical." : "The texts differ.";
  say(spoken, `${result.verdict} ${same}`);
  start();
}

function addGap(found) {
  result.difference = found.difference;
  drawFacts();
}

function fold() {
  const value = props.value || "";
  if (value === seen) return;
  const isFirst = seen === null;
  seen = value;
  const now = value ? JSON.parse(value) : { state: "empty", result: null };
  root.dataset.state = now.state;
  say(fault, now.error || "");
  if (now.state === "running") drawRunning(now);
  else say(status, "");
  if (now.result && now.result.number !== result?.number) drawResult(now.result, !isFirst);
  else if (now.result?.difference) addGap(now.result); // its gap is known now
  if (now.state !== "running" && !now.result) setLanes([]);
  root.classList.toggle("has-result", Boolean(now.result));
  hollow.hidden = now.state === "running" || Boolean(now.result);
}

still.addEventListener("change", obeyMotion);
setSpeed(1);
obeyMotion();
watch("value", () => requestAnimationFrame(fold));
fold();
