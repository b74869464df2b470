// Two recordings of one prompt, replayed in two columns on one clock. The value is one JSON
// object: what runs now, or the last result; at, more: its number, and whether another one comes.
import { blockOf } from "./block.js";
import { fillIn, make, say, withRole } from "./elements.js";
import { drawFacts } from "./figures.js";
import { counted, number } from "./format.js";
import { lanes, makeLane, markParting, record, setLanes, track } from "./lanes.js";
import { pace } from "./pace.js";
import { store, stored } from "./page.js";
import { drawRaceClock, isGpuClock, meetPace, raceBox } from "./race.js";
import { modelled } from "./race_model.js";
import { at, controls, end, pause, seek, setEnd, start, still } from "./replay.js";

const { root, trigger, every, watch, value } = blockOf("compare");
const LOOK_EVERY = 500; // ms: what is drawn here takes time from what is measured

let seen = null;
let shown = {}; // what was seen, parsed
export let result = null; // as it was measured
export let race = null; // the result on the clock that is chosen

// ---- the fixed parts ----

const spoken = withRole(make("p", "compare-spoken"), "status"); // for screen readers: a sentence when there is news
const fault = withRole(make("p", "compare-error"), "alert");
const status = make("p", "compare-status");
export const facts = make("div", "compare-facts");
const hollow = make(
  "p",
  "hollow",
  "No comparison yet. Run both: the prompt is answered by plain decoding and with a drafter, one " +
    "after the other, and both recordings are replayed here on one clock.",
);
root.replaceChildren(spoken, fault, status, track, controls, raceBox, facts, hollow);

// ---- the value ----

function drawRunning(now) {
  pause();
  result = null;
  if (lanes.length !== 2 || lanes[0].side) {
    const [left, right] = now.names ?? ["Plain", "With the drafter"]; // it begins
    setLanes([makeLane(left, "plain"), makeLane(right, "drafted")]);
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
    say(lane.count, isNow ? counted(now.tokens, "token") : isDone ? "recorded" : "waits for its turn");
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
export function retime() {
  if (!result) return;
  const share = end ? at / end : 0;
  race = isGpuClock() ? modelled(result, pace) : result;
  setEnd(Math.max(...race.sides.map((side) => side.total_ms)));
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
  const text = value();
  if (text === seen) return;
  const isFirst = seen === null;
  seen = text;
  const now = (shown = text ? JSON.parse(text) : lastRace());
  root.dataset.state = now.state;
  say(fault, now.error || "");
  if (now.state === "running") drawRunning(now);
  else say(status, "");
  if (now.result && now.result.number !== result?.number) drawResult(now.result, !isFirst);
  else if (now.result?.difference) addGap(now.result); // its gap is known now
  if (now.state !== "running" && !now.result) setLanes([]);
  root.classList.toggle("has-result", Boolean(now.result));
  hollow.hidden = now.state === "running" || Boolean(now.result);
  if (text && now.result) keepRace(now.result);
}

// ---- a reload shows the last result again, with its prompt ----

const RACE_KEY = "medusa-chat-race";

function promptBox() {
  return document.querySelector("#compare-prompt textarea");
}

document.addEventListener("input", (event) => {
  if (event.isTrusted && event.target === promptBox()) isTyped = true;
});

let isTyped = false; // since the page was loaded

function keepRace(found) {
  store("sessionStorage", RACE_KEY, JSON.stringify(found));
}

// The server numbers the races of this page from 1 on: this one is none of them.
function lastRace() {
  const found = JSON.parse(stored("sessionStorage", RACE_KEY) || "null");
  if (!found) return { state: "empty", result: null };
  setTimeout(() => fillPrompt(found.prompt), 500); // Gradio draws the box later
  return { state: "still", result: { ...found, number: 0 } };
}

function fillPrompt(text) {
  const box = promptBox();
  if (box && !isTyped) fillIn(box, text);
}

watch(() => requestAnimationFrame(fold));
every(LOOK_EVERY, () => {
  if (shown.more) trigger("look", { at: shown.at });
});
meetPace();
fold();
