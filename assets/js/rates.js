// Tokens per second over an answer. Steps fall into at most 96 buckets of equal time; when they
// are full, neighbours merge and the width doubles: an update costs what its new steps cost.
const BUCKETS = 96;

export function emptyChart() {
  return { width: 0.04, sums: [], seconds: 0, next: 0, most: 0 };
}

function addToChart(chart, tokens, seconds) {
  let at = chart.seconds;
  const end = at + seconds;
  while (at < end - 1e-9) {
    const bucket = Math.floor(at / chart.width + 1e-6);
    const until = Math.min(end, (bucket + 1) * chart.width);
    chart.sums[bucket] = (chart.sums[bucket] || 0) + (tokens * (until - at)) / seconds;
    at = until;
    if (chart.sums.length >= BUCKETS) mergeBuckets(chart);
  }
  chart.seconds = end;
}

function mergeBuckets(chart) {
  const sums = chart.sums;
  chart.sums = Array.from({ length: Math.ceil(sums.length / 2) }, (_, place) => {
    return (sums[2 * place] || 0) + (sums[2 * place + 1] || 0);
  });
  chart.width *= 2;
}

// Takes the steps that came since the last call; the first of them may be unknown.
export function fillChart(chart, bars, times) {
  while (chart.next < bars.length && bars[chart.next] === undefined) chart.next++;
  for (; chart.next < bars.length && bars[chart.next] !== undefined; chart.next++)
    addToChart(chart, bars[chart.next], Math.max(times[chart.next], 0.001) / 1000);
}

// [seconds, tokens/s] at the middle of each bucket, smoothed over its neighbours.
export function rates(chart) {
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

export function niceAbove(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * unit >= value * 1.04) * unit || value;
}
