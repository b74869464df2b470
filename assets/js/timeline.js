// A bar for every step. Click, drag or arrow keys choose one; play walks through them in the time
// they took. `goTo(step)` and `goLive()` are the panel's.
import { button, draw, hide, make, say, set } from "./elements.js";
import { number } from "./format.js";
import { paceMode, paceOf } from "./pace.js";
import { panel, root, schedule, trigger, widthIn } from "./panel.js";
import { show } from "./show.js";
import { goLive, goTo } from "./steps.js";
import { hideTip, showTip } from "./walk.js";

const BARS_HIGH = 36;
export const timeline = make("div", "timeline");
const playbar = make("div", "playbar");
export const strip = make("div", "strip");
const space = make("div", "space");
export const bars = draw("svg", { class: "bars", tabindex: "0", role: "slider", height: BARS_HIGH });
const counter = make("span", "counter");
export const pacebar = make("div", "pacebar");
bars.setAttribute("aria-label", "Step of the answer, by tokens per step");
strip.title = "tokens per step: click, drag, ← →";
export const barRow = bars.appendChild(draw("g", {}));
space.append(bars);
strip.append(space);
const playButton = button("play", "", () => playOrPause());
export const back = button("back", "back to the latest step", () => goLive());
const rest = button("skip", "show the rest", () => show.skip());
hide(rest, true);
hide(back, true);
export const toNewest = button("newest", "back to the newest answer", () => trigger("newest"));
hide(toNewest, true);
playbar.append(playButton, strip, counter);
pacebar.append(rest, back, toNewest);
timeline.append(playbar, pacebar);
const pool = [];
nameplay();

export function drawTimeline(known, total, now, isLive) {
  const across = widthIn(strip) || 60;
  // whole pixels: with a pitch of its own for every step all bars would be written anew at each
  const pitch = Math.max(5, Math.min(14, Math.floor(across / Math.max(total, 1))));
  const moved = total !== panel.line.total || now !== panel.line.now || pitch !== panel.line.pitch;
  // who scrolled back while the answer runs is not pulled to its end
  const follows = !isLive || panel.scrolled + across > (panel.line.total - 3) * panel.line.pitch;
  panel.line = { ...panel.line, total, now, pitch };
  say(counter, `step ${now + 1} / ${total}`);
  panel.line.length = `${Math.max(across, Math.ceil(total * pitch))}px`;
  if (moved && follows) bringIntoView(isLive ? total - 1 : now, across);
  panel.line.from = Math.floor(panel.scrolled / pitch);
  const seen = Math.min(total - panel.line.from, Math.ceil(across / pitch) + 1);
  set(bars, { viewBox: `0 0 ${across} ${BARS_HIGH}`, width: across });
  let most = panel.line.most || 2;
  for (let place = 0; place < seen; place++) most = Math.max(most, known.bars[panel.line.from + place] || 0);
  panel.line.most = most;
  while (pool.length < seen) pool.push(barRow.appendChild(draw("rect", {})));
  // a bar stays where it is in the row, and the row moves: only what is new is written
  set(barRow, { transform: `translate(${-panel.scrolled})` });
  for (let place = 0; place < pool.length; place++) {
    const step = panel.line.from + place;
    drawBar(pool[step % pool.length], place < seen ? step : null, known);
  }
  set(bars, {
    "aria-valuemin": 1,
    "aria-valuemax": total,
    "aria-valuenow": now + 1,
    "aria-valuetext": stepWords(known, now, total),
  });
}

function drawBar(bar, step, known) {
  const tokens = known.bars[step];
  const drawn = `${step}|${tokens}|${panel.line.most}|${panel.line.pitch}|${step === panel.line.now}`;
  if (bar.drawn === drawn) return;
  bar.drawn = drawn;
  if (step === null) {
    set(bar, { display: "none" });
    return;
  }
  const high = tokens === undefined ? 3 : Math.max(3, (tokens / panel.line.most) * (BARS_HIGH - 4));
  const kind = tokens === undefined ? "unknown" : `t${Math.min(tokens, 6)}`;
  if (bar.hasAttribute("display")) bar.removeAttribute("display");
  set(bar, {
    class: `bar ${kind}${step === panel.line.now ? " now" : ""}`,
    x: step * panel.line.pitch + 0.5,
    y: BARS_HIGH - 1 - high,
    width: Math.max(1, panel.line.pitch - (panel.line.pitch > 6 ? 2 : 1)),
    height: high,
    "data-step": step,
  });
}

export function stepWords(known, step, total) {
  const tokens = known.bars[step];
  const more = tokens === undefined ? "" : `: ${tokens} token${tokens === 1 ? "" : "s"}`;
  const time = known.times[step] === undefined ? "" : `, ${number(known.times[step], 1)} ms`;
  return `step ${step + 1} of ${total}${more}${time}`;
}

function bringIntoView(step, across) {
  const at = step * panel.line.pitch;
  const room = Math.min(24, across / 6);
  let to = panel.scrolled;
  if (at < panel.scrolled + room) to = Math.max(0, at - room);
  else if (at + panel.line.pitch > panel.scrolled + across - room) to = at + panel.line.pitch - across + room;
  panel.scrolled = Math.floor(Math.min(to, Math.max(0, Math.ceil(panel.line.total * panel.line.pitch) - across)));
}

// The bars are drawn where they belong already; the strip itself follows last in a frame, and not
// in every one: scrolling lays out what was written before it.
export function scrollTimeline() {
  if (space.style.width !== panel.line.length) space.style.width = panel.line.length;
  if (strip.dataset.at === String(panel.scrolled)) return;
  strip.dataset.at = panel.scrolled;
  strip.scrollLeft = panel.scrolled;
}

function stepAt(event) {
  const x = event.clientX - bars.getBoundingClientRect().left + strip.scrollLeft;
  return Math.max(0, Math.min(panel.line.total - 1, Math.floor(x / panel.line.pitch)));
}

// ---- by hand ----

bars.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !panel.line.total) return;
  bars.setPointerCapture(event.pointerId);
  stopPlay();
  goTo(stepAt(event));
});
bars.addEventListener("pointermove", (event) => {
  if (bars.hasPointerCapture(event.pointerId)) {
    if (stepAt(event) !== panel.line.now) goTo(stepAt(event));
  } else if (panel.line.total && event.pointerType !== "touch") {
    const step = stepAt(event);
    const at = bars.getBoundingClientRect();
    const left = at.left + (step - panel.line.from) * panel.line.pitch;
    showTip({ left, top: at.top, bottom: innerHeight }, stepWords(panel.known, step, panel.line.total), []);
  }
});
bars.addEventListener("pointerleave", () => hideTip());
bars.addEventListener("keydown", (event) => {
  if (!panel.line.total || event.ctrlKey || event.metaKey || event.altKey) return;
  const last = panel.line.total - 1;
  const to = {
    ...{ ArrowLeft: panel.line.now - 1, ArrowDown: panel.line.now - 1, ArrowRight: panel.line.now + 1 },
    ...{ ArrowUp: panel.line.now + 1, PageUp: panel.line.now - 10, PageDown: panel.line.now + 10, Home: 0, End: last },
  }[event.key];
  if (event.key === " ") playOrPause();
  else if (to === undefined) return;
  else {
    stopPlay();
    goTo(Math.max(0, Math.min(last, to)));
  }
  event.preventDefault();
});
strip.addEventListener("scroll", () => {
  if (Math.abs(strip.scrollLeft - panel.scrolled) < 1) return; // it was drawn there
  panel.scrolled = strip.scrollLeft;
  strip.dataset.at = panel.scrolled;
  schedule();
});

// ---- by itself ----

export function nameplay() {
  const isShow = Boolean(show.isOn());
  const isByHand = paceMode() === "step";
  const isOn = !isByHand && (isShow ? !show.isPaused() : Boolean(panel.play));
  const name = isOn ? "Pause" : isByHand ? "Next step" : isShow ? "Go on" : "Play the steps";
  playButton.dataset.playing = String(isOn);
  playButton.setAttribute("aria-label", name);
  playButton.title = `${name} (space)`;
  hide(rest, !isShow);
}

// One step by hand, else on or off: of the answer that is shown, or of one that was.
function playOrPause() {
  const isByHand = paceMode() === "step";
  if (show.isOn()) {
    const isAtEnd = panel.pinned === null || panel.pinned >= panel.line.total - 1;
    if (!isAtEnd && isByHand) goTo(panel.pinned + 1);
    else show[isByHand ? "next" : "toggle"]();
  } else if (isByHand) goTo(panel.line.now >= panel.line.total - 1 ? 0 : panel.line.now + 1);
  else if (panel.play) stopPlay();
  else startPlay();
}

export function startPlay() {
  if (!panel.line.total) return;
  const step = panel.line.now >= panel.line.total - 1 ? 0 : panel.line.now;
  goTo(step);
  panel.play = { step, due: performance.now() + pause(step) };
  nameplay();
  requestAnimationFrame(playOn);
}

export function stopPlay() {
  panel.play = null;
  nameplay();
}

// How long a step stands: as long as the next one takes to be made, at the pace that is chosen.
function pause(step) {
  return paceOf(panel.known.nodes[step + 1] ?? 1, panel.known.times[step + 1] ?? 20);
}

function playOn(now) {
  if (!panel.play || !root.isConnected) return;
  if (now - panel.play.due > 500) panel.play.due = now; // the tab slept: go on from here
  let step = panel.play.step;
  while (step < panel.line.total - 1 && panel.play.due <= now) {
    step++;
    panel.play.due += pause(step);
  }
  if (step !== panel.play.step) {
    panel.play.step = step;
    goTo(step);
  }
  if (step < panel.line.total - 1) requestAnimationFrame(playOn);
  else if (panel.data.ended) stopPlay();
  else goLive(); // it caught up with an answer that still runs
}
