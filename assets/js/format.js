// Figures, counts and tokens in words.
const ISOLATE = ["\u2068", "\u2069"]; // a token never turns the line that quotes it around

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

// A share of 1 with as many digits as say something.
export function percent(p) {
  if (p === null || p === undefined) return "–";
  if (p > 0 && p < 0.001) return "<0.1%";
  return `${(p * 100).toFixed(p < 0.0995 ? 1 : 0)}%`;
}

export function figure(list, node) {
  return list ? list[node] : null;
}

export function quoted(text) {
  return ISOLATE[0] + text + ISOLATE[1];
}

export function counted(count, what) {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

export function number(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

// A time with three digits: 4.56 ms, 444 ms, 1.32 s, 59.9 s.
export function duration(ms) {
  if (ms === null) return "–";
  const [value, unit] = ms < 999.5 ? [ms, "ms"] : [ms / 1000, "s"];
  return `${value >= 99.95 ? count(Math.round(value)) : Number(value.toPrecision(3))} ${unit}`;
}

// Of a message that is being written, in tokens; left: of the context after it, below 0 too many.
export function wordsOfCount(message, left) {
  const after = left < 0 ? `${count(-left)} too many` : `${count(left)} left`;
  return `${count(message)} token${message === 1 ? "" : "s"}, ${after}`;
}
