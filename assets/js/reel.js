// The clock of an answer that is shown slower than it comes.
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
