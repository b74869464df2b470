// Tokens per second over the answer. Steps fall into at most 96 buckets of equal time; when they
// are full, neighbours merge and the width doubles: an update costs what its new steps cost.
const BUCKETS = 96;
const CHART_HIGH = 76;
const CHART_LEFT = 38;
const chartBox = make("div", "chart");
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
let chart = emptyChart();

function emptyChart() {
  return { width: 0.04, sums: [], seconds: 0, next: 0, most: 0 };
}

function addToChart(tokens, seconds) {
  let at = chart.seconds;
  const end = at + seconds;
  while (at < end - 1e-9) {
    const bucket = Math.floor(at / chart.width + 1e-6);
    const until = Math.min(end, (bucket + 1) * chart.width);
    chart.sums[bucket] = (chart.sums[bucket] || 0) + (tokens * (until - at)) / seconds;
    at = until;
    if (chart.sums.length >= BUCKETS) mergeBuckets();
  }
  chart.seconds = end;
}

function mergeBuckets() {
  const sums = chart.sums;
  chart.sums = Array.from({ length: Math.ceil(sums.length / 2) }, (_, place) => {
    return (sums[2 * place] || 0) + (sums[2 * place + 1] || 0);
  });
  chart.width *= 2;
}

// Takes the steps that came since the last call; the first of them may be unknown.
function fillChart(bars, times) {
  while (chart.next < bars.length && bars[chart.next] === undefined) chart.next++;
  for (; chart.next < bars.length && bars[chart.next] !== undefined; chart.next++)
    addToChart(bars[chart.next], Math.max(times[chart.next], 0.001) / 1000);
}

// [seconds, tokens/s] at the middle of each bucket, smoothed over its neighbours.
function rates() {
  const points = [];
  const last = chart.seconds / chart.width;
  for (let place = 0; place < chart.sums.length; place++) {
    if (last - place < 0.5 && place > 0) break; // too little of it is there yet
    let tokens = 0;
    let seconds = 0;
    for (let near = Math.max(0, place - 1); near <= place + 1 && near < last; near++) {
      tokens += chart.sums[near] || 0;
      seconds += chart.width * Math.min(1, last - near);
    }
    const middle = Math.min((place + 0.5) * chart.width, chart.seconds);
    points.push([middle, tokens / seconds]);
  }
  return points;
}

function drawChart(data, bars, times, shown) {
  fillChart(bars, times);
  const across = Math.max(120, widthIn(chartBox));
  const f = data.figures;
  const points = rates();
  hide(chartBox, !points.length);
  if (!points.length) return;
  const rateOf = (point) => point[1];
  const before = data.ended ? 0 : chart.most; // the axis stands still while it runs
  chart.most = Math.max(before, f.plain || 0, ...points.map(rateOf));
  const top = niceAbove(chart.most);
  const [left, right, low, high] = [CHART_LEFT, across - 6, CHART_HIGH - 16, 15];
  const x = (seconds) => left + ((right - left) * seconds) / Math.max(chart.seconds, 1e-6);
  const y = (rate) => low - ((low - high) * rate) / top;
  const at = points.map(([s, r]) => `${x(s).toFixed(1)} ${y(r).toFixed(1)}`);
  const [from, to] = [x(0).toFixed(1), x(chart.seconds).toFixed(1)];
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
  say(labels.end, `${chart.seconds.toFixed(chart.seconds < 9.95 ? 1 : 0)} s`);
  set(lines.here, { d: shown === null ? "" : `M${x(secondsAt(times, shown)).toFixed(1)} ${high}V${low}` });
}

function secondsAt(times, step) {
  let sum = 0;
  for (let place = 0; place <= step; place++) sum += times[place] || 0;
  return Math.min(sum / 1000, chart.seconds);
}

function niceAbove(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * unit >= value * 1.04) * unit || value;
}

// What the line shows, for who cannot see it.
function describeChart(f) {
  const points = rates().map((point) => point[1]);
  if (!points.length) return;
  const [least, most] = [Math.min(...points), Math.max(...points)].map(Math.round);
  const base = f.plain === null || f.is_plain ? "" : `; plain decoding ${number(f.plain, 1)}`;
  const text = `Tokens per second over ${chart.seconds.toFixed(1)} s: ${least} to ${most}, mean ${number(f.rate, 1)}${base}`;
  chartSvg.setAttribute("aria-label", text);
}

// How often a drafted token was accepted, by its depth: of the steps that drafted and accepted the one
// before it. A step gives one token more than it accepts.
function drawDepths() {
  const drafted = known.bars.filter((_, step) => known.nodes[step] > 1);
  const rows = [];
  const most = drafted.reduce((deepest, tokens) => Math.max(deepest, tokens), 1);
  for (let depth = 1; depth <= most && drafted.length; depth++) {
    const tested = drafted.filter((tokens) => tokens >= depth).length;
    const accepted = drafted.filter((tokens) => tokens > depth).length;
    const line = make("tr");
    const share = make("td", "bar");
    share.append(meterOf(accepted / tested));
    const name = shown?.parent ? columnName(data, shown, depth) : `depth ${depth}`;
    line.append(make("th", "", name), make("td", "p", percent(accepted / tested)), share);
    line.append(make("td", "", `${count(accepted)} of ${counted(tested, "step")}`));
    rows.push(line);
  }
  const table = make("table");
  table.append(make("caption", "", DEPTH_WORDS), ...rows);
  depths.replaceChildren(rows.length ? table : make("p", "mask-note", "No step of this answer has drafted."));
}

const DEPTH_WORDS =
  "How often a token at this depth was accepted, of the steps that had accepted the one before it. " +
  "What this taught about the cost of a step stands in the Tune tab.";
