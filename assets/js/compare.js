// Two recordings of one prompt, replayed in two columns on one clock. The value is one JSON
// object: what runs now, or the last result. Model text is written with appendData only, so that
// a frame costs what is new and not what is there.
const SPEEDS = [[1, "1×"], [0.5, "½×"], [0.25, "¼×"]];
const NOTCHES = 200; // of the scrubber
const CHUNK = 2000; // characters after which a new line begins a new block
const root = element.querySelector(".compare-block") || element;
const still = matchMedia("(prefers-reduced-motion: reduce)");

let seen = null;
let result = null; // as it was measured
let race = null; // the result on the clock that is chosen
let lanes = [];
let at = 0; // milliseconds on the race's clock
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
root.replaceChildren(spoken, fault, status, track, controls, raceBox, facts, hollow);

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
  const kind = isGpuClock() ? ", modelled" : "";
  say(lane.count, `${tokens} tokens · ${number(rate, rate < 10 ? 1 : 0)} tokens/s${kind}`);
  say(lane.flag, isOver ? flagOf(side) : "");
  lane.bar.value = side.tokens ? tokens / side.tokens : 1;
  lane.box.classList.toggle("is-over", isOver);
}

function flagOf(side) {
  const other = race.sides.find((one) => one !== side);
  if (side.total_ms >= other.total_ms) return "finished";
  if (!race.is_same_length) return "⚑ finished first";
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
  at = Math.min(end, at + (Math.max(0, now - before) * speed) / stretch());
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
  setLanes(result.sides.map(record));
  markParting();
  drawRaceClock();
  retime();
  seek(isNew && !still.matches ? 0 : end);
  if (!isNew) return;
  const same = result.identical ? "Both texts are identical." : "The texts differ.";
  say(spoken, `${race.verdict} ${same}`);
  start();
}

// The race on the clock that is chosen now, as far as it had come.
function retime() {
  if (!result) return;
  const share = end ? at / end : 0;
  race = isGpuClock() ? modelled(result, paceNow()) : result;
  end = Math.max(...race.sides.map((side) => side.total_ms));
  lanes.forEach((lane, which) => {
    lane.side = race.sides[which];
    lane.frames = lane.side.frames;
  });
  drawFacts();
  seek(share * end);
}

function addGap(found) {
  result.difference = race.difference = found.difference;
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
meetPace();
fold();
