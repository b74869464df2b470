// A bar for every step. Click, drag or arrow keys choose one; play walks through them in the time
// they took. `goTo(step)` and `goLive()` are the panel's.
const BARS_HIGH = 36;
const timeline = make("div", "timeline");
const playbar = make("div", "playbar");
const strip = make("div", "strip");
const space = make("div", "space");
const bars = draw("svg", { class: "bars", tabindex: "0", role: "slider", height: BARS_HIGH });
const counter = make("span", "counter");
const pacebar = make("div", "pacebar");
bars.setAttribute("aria-label", "Step of the answer, by tokens per step");
strip.title = "tokens per step: click, drag, ← →";
const barRow = bars.appendChild(draw("g", {}));
space.append(bars);
strip.append(space);
const playButton = button("play", "", () => playOrPause());
const back = button("back", "back to the latest step", () => goLive());
const rest = button("skip", "show the rest", () => window.medusaShow?.skip());
hide(rest, true);
hide(back, true);
const toNewest = button("newest", "back to the newest answer", () => trigger("newest"));
hide(toNewest, true);
playbar.append(playButton, strip, counter);
pacebar.append(rest, back, toNewest);
timeline.append(playbar, pacebar);
let play = null; // {step, due}: the step that is shown, and when the next one follows
let pool = [];
let line = { total: 0, pitch: 14, now: 0, from: 0 };
let scrolled = 0; // where the strip is scrolled to, or will be at the end of this frame
nameplay();

function drawTimeline(known, total, now, isLive) {
  const across = widthIn(strip) || 60;
  // whole pixels: with a pitch of its own for every step all bars would be written anew at each
  const pitch = Math.max(5, Math.min(14, Math.floor(across / Math.max(total, 1))));
  const moved = total !== line.total || now !== line.now || pitch !== line.pitch;
  // who scrolled back while the answer runs is not pulled to its end
  const follows = !isLive || scrolled + across > (line.total - 3) * line.pitch;
  line = { ...line, total, now, pitch };
  say(counter, `step ${now + 1} / ${total}`);
  line.length = `${Math.max(across, Math.ceil(total * pitch))}px`;
  if (moved && follows) bringIntoView(isLive ? total - 1 : now, across);
  line.from = Math.floor(scrolled / pitch);
  const seen = Math.min(total - line.from, Math.ceil(across / pitch) + 1);
  set(bars, { viewBox: `0 0 ${across} ${BARS_HIGH}`, width: across });
  let most = line.most || 2;
  for (let place = 0; place < seen; place++) most = Math.max(most, known.bars[line.from + place] || 0);
  line.most = most;
  while (pool.length < seen) pool.push(barRow.appendChild(draw("rect", {})));
  // a bar stays where it is in the row, and the row moves: only what is new is written
  set(barRow, { transform: `translate(${-scrolled})` });
  for (let place = 0; place < pool.length; place++) {
    const step = line.from + place;
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
  const drawn = `${step}|${tokens}|${line.most}|${line.pitch}|${step === line.now}`;
  if (bar.drawn === drawn) return;
  bar.drawn = drawn;
  if (step === null) {
    set(bar, { display: "none" });
    return;
  }
  const high = tokens === undefined ? 3 : Math.max(3, (tokens / line.most) * (BARS_HIGH - 4));
  const kind = tokens === undefined ? "unknown" : `t${Math.min(tokens, 6)}`;
  if (bar.hasAttribute("display")) bar.removeAttribute("display");
  set(bar, {
    class: `bar ${kind}${step === line.now ? " now" : ""}`,
    x: step * line.pitch + 0.5,
    y: BARS_HIGH - 1 - high,
    width: Math.max(1, line.pitch - (line.pitch > 6 ? 2 : 1)),
    height: high,
    "data-step": step,
  });
}

function stepWords(known, step, total) {
  const tokens = known.bars[step];
  const more = tokens === undefined ? "" : `: ${tokens} token${tokens === 1 ? "" : "s"}`;
  const time = known.times[step] === undefined ? "" : `, ${number(known.times[step], 1)} ms`;
  return `step ${step + 1} of ${total}${more}${time}`;
}

function bringIntoView(step, across) {
  const at = step * line.pitch;
  const room = Math.min(24, across / 6);
  let to = scrolled;
  if (at < scrolled + room) to = Math.max(0, at - room);
  else if (at + line.pitch > scrolled + across - room) to = at + line.pitch - across + room;
  scrolled = Math.floor(Math.min(to, Math.max(0, Math.ceil(line.total * line.pitch) - across)));
}

// The bars are drawn where they belong already; the strip itself follows last in a frame, and not
// in every one: scrolling lays out what was written before it.
function scrollTimeline() {
  if (space.style.width !== line.length) space.style.width = line.length;
  if (strip.dataset.at === String(scrolled)) return;
  strip.dataset.at = scrolled;
  strip.scrollLeft = scrolled;
}

function stepAt(event) {
  const x = event.clientX - bars.getBoundingClientRect().left + strip.scrollLeft;
  return Math.max(0, Math.min(line.total - 1, Math.floor(x / line.pitch)));
}

// ---- by hand ----

bars.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !line.total) return;
  bars.setPointerCapture(event.pointerId);
  stopPlay();
  goTo(stepAt(event));
});
bars.addEventListener("pointermove", (event) => {
  if (bars.hasPointerCapture(event.pointerId)) {
    if (stepAt(event) !== line.now) goTo(stepAt(event));
  } else if (line.total && event.pointerType !== "touch") {
    const step = stepAt(event);
    const at = bars.getBoundingClientRect();
    const left = at.left + (step - line.from) * line.pitch;
    showTip({ left, top: at.top, bottom: innerHeight }, stepWords(known, step, line.total), []);
  }
});
bars.addEventListener("pointerleave", () => hideTip());
bars.addEventListener("keydown", (event) => {
  if (!line.total || event.ctrlKey || event.metaKey || event.altKey) return;
  const last = line.total - 1;
  const to = {
    ...{ ArrowLeft: line.now - 1, ArrowDown: line.now - 1, ArrowRight: line.now + 1 },
    ...{ ArrowUp: line.now + 1, PageUp: line.now - 10, PageDown: line.now + 10, Home: 0, End: last },
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
  if (Math.abs(strip.scrollLeft - scrolled) < 1) return; // it was drawn there
  scrolled = strip.scrollLeft;
  strip.dataset.at = scrolled;
  schedule();
});

// ---- by itself ----

function nameplay() {
  const isShow = Boolean(window.medusaShow?.isOn());
  const isByHand = window.medusaPace?.mode() === "step";
  const isOn = !isByHand && (isShow ? !window.medusaShow.isPaused() : Boolean(play));
  const name = isOn ? "Pause" : isByHand ? "Next step" : isShow ? "Go on" : "Play the steps";
  playButton.dataset.playing = String(isOn);
  playButton.setAttribute("aria-label", name);
  playButton.title = `${name} (space)`;
  hide(rest, !isShow);
}

// One step by hand, else on or off: of the answer that is shown, or of one that was.
function playOrPause() {
  const isByHand = window.medusaPace.mode() === "step";
  if (window.medusaShow?.isOn()) {
    const isAtEnd = pinned === null || pinned >= line.total - 1;
    if (!isAtEnd && isByHand) goTo(pinned + 1);
    else window.medusaShow[isByHand ? "next" : "toggle"]();
  } else if (isByHand) goTo(line.now >= line.total - 1 ? 0 : line.now + 1);
  else if (play) stopPlay();
  else startPlay();
}

function startPlay() {
  if (!line.total) return;
  const step = line.now >= line.total - 1 ? 0 : line.now;
  goTo(step);
  play = { step, due: performance.now() + pause(step) };
  nameplay();
  requestAnimationFrame(playOn);
}

function stopPlay() {
  play = null;
  nameplay();
}

// How long a step stands: as long as the next one takes to be made, at the pace that is chosen.
function pause(step) {
  return window.medusaPace.of(known.nodes[step + 1] ?? 1, known.times[step + 1] ?? 20);
}

function playOn(now) {
  if (!play || !element.isConnected) return;
  if (now - play.due > 500) play.due = now; // the tab slept: go on from here
  let step = play.step;
  while (step < line.total - 1 && play.due <= now) {
    step++;
    play.due += pause(step);
  }
  if (step !== play.step) {
    play.step = step;
    goTo(step);
  }
  if (step < line.total - 1) requestAnimationFrame(playOn);
  else if (data.ended) stopPlay();
  else goLive(); // it caught up with an answer that still runs
}
