// The clock of a replay, and its controls: play, restart, speed, scrubber. Where less motion is wanted,
// only the scrubber stays.
import { blockOf } from "./block.js";
import { button, make, say, withRole } from "./elements.js";
import { lanes, show } from "./lanes.js";
import { stretch } from "./race.js";

const { root } = blockOf("compare");
const SPEEDS = [[1, "1×"], [0.5, "½×"], [0.25, "¼×"]];
const NOTCHES = 200; // of the scrubber
export const still = matchMedia("(prefers-reduced-motion: reduce)");
export const controls = withRole(make("div", "replay"), "group", "Replay");
const play = button("play", "Play", () => (playing ? pause() : start()));
const again = button("again", "Restart", () => {
  seek(0);
  start();
});
const speeds = withRole(make("div", "speeds"), "group", "Speed of the replay");
const scrub = make("input", "scrub");
const clock = make("span", "clock");

export let at = 0; // milliseconds on the race's clock
export let end = 0;
let speed = 1;
let playing = false;
let before = 0; // time stamp of the last frame

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
controls.append(play, again, speeds, scrub, clock);

export function seconds(ms) {
  return `${(ms / 1000).toFixed(2)} s`;
}

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

export function start() {
  if (still.matches || !lanes.length) return;
  if (at >= end) seek(0);
  playing = true;
  before = performance.now();
  say(play, "Pause");
  requestAnimationFrame(tick);
}

export function pause() {
  playing = false;
  say(play, at >= end ? "Play again" : "Play");
}

export function seek(ms) {
  at = Math.min(end, Math.max(0, ms));
  draw();
  if (!playing) say(play, at >= end ? "Play again" : "Play");
}

export function setEnd(ms) {
  end = ms;
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

still.addEventListener("change", obeyMotion);
setSpeed(1);
obeyMotion();
