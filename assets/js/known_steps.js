// What is known of an answer's steps, by their index: tokens, times in ms, nodes, and where in its text
// each ends. `begin`: where the first one begins. Lines of the panel bring parts of it.
export function nothingKnown() {
  return { bars: [], times: [], nodes: [], ends: [] };
}

// line: {first, at, bars, times, nodes, lengths}: from which step on, and where in the text that begins.
export function learnFrom(known, line) {
  let end = line.at;
  if (!line.first) known.begin = line.at;
  line.bars.forEach((tokens, place) => {
    known.bars[line.first + place] = tokens;
    known.times[line.first + place] = line.times[place];
    known.nodes[line.first + place] = line.nodes[place];
    known.ends[line.first + place] = end += line.lengths[place];
  });
}

// The step that a character of the text came in: {step, from, to}, or null. What stands before the
// first step came with the prompt.
export function stepOfText(known, at) {
  const step = known.ends.findIndex((end) => at < end);
  const from = step > 0 ? known.ends[step - 1] : known.begin;
  if (step < 0 || from === undefined || at < from) return null;
  return { step, from, to: known.ends[step] };
}

// [of the steps that drafted and had accepted what stands before it, how many accepted this depth]. A
// step gives one token more than it accepts.
export function acceptedByDepth(known) {
  const drafted = known.bars.filter((_, step) => known.nodes[step] > 1);
  const deepest = drafted.reduce((most, tokens) => Math.max(most, tokens), drafted.length ? 1 : 0);
  return Array.from({ length: deepest }, (_, place) => {
    const tested = drafted.filter((tokens) => tokens >= place + 1).length;
    return [tested, drafted.filter((tokens) => tokens > place + 1).length];
  });
}

// ---- the clock of an answer that is shown slower than it comes ----

const ASLEEP = 500; // ms: the tab slept, it goes on from here
const LOOK = 30; // ms between two looks at the clock

// Up to which step it is due by `now`; moves reel.doneAt, when the step before the next one was due.
// pauseOf: ms that a step takes. Steps by hand wait for ever, but for the first.
export function dueBy(reel, now, from, pauseOf, isByHand) {
  const last = reel.steps.length - 1;
  let to = from;
  while (to < last) {
    const pause = to < 0 && isByHand ? 0 : pauseOf(reel.steps[to + 1]);
    const due = reel.doneAt + pause;
    if (due > now) return to;
    reel.doneAt = now - due > ASLEEP ? now : due;
    to++;
  }
  if (!reel.ended) reel.doneAt = Math.max(reel.doneAt, now - LOOK);
  return to;
}
