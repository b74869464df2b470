// What a race came to: its verdict, the first difference, the figures, measured and modelled.
import { facts, race, result } from "./compare.js";
import { button, make } from "./elements.js";
import { counted, duration, number } from "./format.js";
import { lanes, track } from "./lanes.js";
import { pace } from "./pace.js";
import { isGpuClock } from "./race.js";
import { end, pause, seek } from "./replay.js";

const TIMES = [
  ["tokens/s", (side) => number(side.rate, 1)],
  ["time to first token", (side) => duration(side.first_ms)],
  ["total time", (side) => duration(side.total_ms)],
  ["ms per step", (side) => number(side.step_ms, 2)],
];
const COUNTS = [
  ["tokens", (side) => String(side.tokens)],
  ["steps", (side) => String(side.steps)],
  ["tokens per step", (side) => number(side.per_step, 2)],
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
  const { size, precision, gpu } = pace;
  const on = `Modelled: a ${size} in ${precision} on an ${gpu}`;
  if (isGpuClock()) box.append(group("modelled", on, TIMES, race.sides));
  box.append(group("measured", "Measured on this machine", TIMES, result.sides));
  box.append(group("counted", "Counted", COUNTS, result.sides));
  return box;
}

function group(kind, title, rows, sides) {
  const body = make("tbody", kind);
  const head = body.insertRow().appendChild(make("th", "", title));
  head.colSpan = 3;
  head.scope = "rowgroup";
  for (const [label, of] of rows) {
    const row = body.insertRow();
    const name = make("th", "", label);
    name.scope = "row";
    row.append(name, ...sides.map((side) => make("td", "", of(side))));
  }
  return body;
}

function term(value, label) {
  const box = make("span", "term");
  box.append(make("b", "", value), make("span", "label", label));
  return box;
}

function equation() {
  const box = make("div", "equation");
  const kind = isGpuClock() ? ", modelled" : "";
  const isPlain = (race.base || "plain decoding") === "plain decoding";
  const rate = isPlain ? "acceleration rate (tokens per step)" : "tokens per step (right / left)";
  const steps = isPlain ? "tree step / plain step" : "step of the right / of the left";
  box.append(
    term(`${number(race.speedup, 2)}×`, `speedup${kind}`),
    make("span", "sign", "="),
    term(number(race.acceleration_rate, 2), rate),
    make("span", "sign", "/"),
    term(number(isPlain ? Math.max(1, race.overhead) : race.overhead, 2), `overhead${kind} (${steps})`),
  );
  if (isPlain && race.overhead !== null && race.overhead < 1) box.append(make("span", "label", noise(race.overhead)));
  return box;
}

function noise(overhead) {
  return `${number(overhead, 2)} was measured: noise, for a tree costs no less than its root.`;
}

function ratios() {
  const wall = `Wall-clock ratio of the decoding: ${number(result.wall_clock_ratio, 2)}×`;
  const whole = `with time to first token: ${number(result.total_ratio, 2)}×.`;
  const lengths = result.is_race ? "" : " The speedup is per token, these ratios are of whole answers.";
  return `${wall}; ${whole}${lengths}`;
}

function badge() {
  if (result.identical) {
    return make("p", "badge identical", `✓ identical: all ${counted(result.tokens, "token")}`);
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

// What was measured here: it stays beside what is modelled.
function measured() {
  const said = isGpuClock() ? `: ${result.verdict} ` : ", ";
  const against = isGpuClock() ? "Against" : "against";
  const show =
    result.show_nodes === null
      ? ""
      : " Every step drafted the nodes of a show, whether they pay here or not.";
  return `Measured on this machine${said}${against} ${result.baseline}. ${ratios()}${show}`;
}

export function drawFacts() {
  const verdict = make("p", "compare-verdict", race.verdict);
  verdict.classList.toggle("slower", race.is_slower);
  facts.replaceChildren(verdict, badge(), equation());
  facts.append(make("p", "compare-notes measured-words", measured()), table());
  facts.append(make("p", "compare-notes", result.how));
}
