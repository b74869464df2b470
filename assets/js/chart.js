// The line of tokens per second over the answer, and the table of what each depth accepted.
import { draw, hide, make, meterOf, say, set } from "./elements.js";
import { count, counted, number, percent } from "./format.js";
import { acceptedByDepth } from "./known_steps.js";
import { depths, panel, widthIn } from "./panel.js";
import { fillChart, niceAbove, rates } from "./rates.js";
import { columnName } from "./words.js";

const CHART_HIGH = 76;
const CHART_LEFT = 38;
export const chartBox = make("div", "chart");
const chartSvg = draw("svg", { class: "rates", role: "img", height: CHART_HIGH });
chartSvg.setAttribute("aria-label", "Tokens per second: no figures yet");
chartBox.append(chartSvg);
const lines = {
  grid: draw("path", { class: "grid" }),
  area: draw("path", { class: "area" }),
  rate: draw("path", { class: "rate" }),
  plain: draw("path", { class: "plain-line" }),
  here: draw("path", { class: "here" }),
};
const labels = {
  most: draw("text", { class: "axis", x: 2, y: 10 }),
  none: draw("text", { class: "axis", x: 2, y: CHART_HIGH - 15 }, "0"),
  begin: draw("text", { class: "axis", x: CHART_LEFT, y: CHART_HIGH - 2 }, "0 s"),
  end: draw("text", { class: "axis end", y: CHART_HIGH - 2 }),
  title: draw("text", { class: "axis title", x: CHART_LEFT, y: 10 }, "tokens/s over the answer"),
  plain: draw("text", { class: "plain-name" }),
};
chartSvg.append(...Object.values(lines), ...Object.values(labels));

export function drawChart(data, bars, times, shown) {
  fillChart(panel.chart, bars, times);
  const across = Math.max(120, widthIn(chartBox));
  const f = data.figures;
  const points = rates(panel.chart);
  hide(chartBox, !points.length);
  if (!points.length) return;
  const rateOf = (point) => point[1];
  const before = data.ended ? 0 : panel.chart.most; // the axis stands still while it runs
  panel.chart.most = Math.max(before, f.plain || 0, ...points.map(rateOf));
  const top = niceAbove(panel.chart.most);
  const [left, right, low, high] = [CHART_LEFT, across - 6, CHART_HIGH - 16, 15];
  const x = (seconds) => left + ((right - left) * seconds) / Math.max(panel.chart.seconds, 1e-6);
  const y = (rate) => low - ((low - high) * rate) / top;
  const at = points.map(([s, r]) => `${x(s).toFixed(1)} ${y(r).toFixed(1)}`);
  const [from, to] = [x(0).toFixed(1), x(panel.chart.seconds).toFixed(1)];
  const line = `M${from} ${at[0].split(" ")[1]}L${at.join("L")}L${to} ${at.at(-1).split(" ")[1]}`;
  set(chartSvg, { viewBox: `0 0 ${across} ${CHART_HIGH}`, width: across });
  set(lines.grid, { d: `M${left} ${low}H${right}M${left} ${(low + high) / 2}H${right}M${left} ${high}H${right}` });
  set(lines.rate, { d: line });
  set(lines.area, { d: `${line}V${low}H${from}Z` });
  const showsPlain = f.plain !== null && !f.is_plain;
  set(lines.plain, { d: showsPlain ? `M${left} ${y(f.plain).toFixed(1)}H${right}` : "" });
  say(labels.plain, showsPlain ? `plain ${Math.round(f.plain)}` : "");
  const under = showsPlain && y(f.plain) < high + 12;
  set(labels.plain, { x: right - 2, y: showsPlain ? y(f.plain) + (under ? 11 : -4) : 0 });
  set(labels.end, { x: right });
  say(labels.most, count(Math.round(top)));
  say(labels.end, `${panel.chart.seconds.toFixed(panel.chart.seconds < 9.95 ? 1 : 0)} s`);
  set(lines.here, { d: shown === null ? "" : `M${x(secondsAt(times, shown)).toFixed(1)} ${high}V${low}` });
}

function secondsAt(times, step) {
  let sum = 0;
  for (let place = 0; place <= step; place++) sum += times[place] || 0;
  return Math.min(sum / 1000, panel.chart.seconds);
}

// What the line shows, for who cannot see it.
export function describeChart(f) {
  const points = rates(panel.chart).map((point) => point[1]);
  if (!points.length) return;
  const [least, most] = [Math.min(...points), Math.max(...points)].map(Math.round);
  const base = f.plain === null || f.is_plain ? "" : `; plain decoding ${number(f.plain, 1)}`;
  const text = `Tokens per second over ${panel.chart.seconds.toFixed(1)} s: ${least} to ${most}, mean ${number(f.rate, 1)}${base}`;
  chartSvg.setAttribute("aria-label", text);
}

// How often a drafted token was accepted, by its depth.
export function drawDepths() {
  const first = panel.shown?.parent ? columnName(panel.data, panel.shown, 1) : "depth 1";
  const kind = first.split(" ")[0]; // one word for all rows, whatever the step that is shown has
  const rows = acceptedByDepth(panel.known).map(([tested, accepted], place) => {
    const line = make("tr");
    const share = make("td", "bar");
    share.append(meterOf(accepted / tested));
    line.append(make("th", "", `${kind} ${place + 1}`), make("td", "p", percent(accepted / tested)), share);
    line.append(make("td", "", `${count(accepted)} of ${counted(tested, "step")}`));
    return line;
  });
  const table = make("table");
  table.append(make("caption", "", DEPTH_WORDS), ...rows);
  depths.replaceChildren(rows.length ? table : make("p", "mask-note", "No step of this answer has drafted."));
}

const DEPTH_WORDS =
  "How often a token at this depth was accepted, of the steps that had accepted the one before it. " +
  "What a step costs, as the answers taught it, is in the Tune tab.";
