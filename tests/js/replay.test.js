// What is known of an answer's steps, and the clock of one that is shown slower than it comes.
import assert from "node:assert/strict";
import { test } from "node:test";
import { acceptedByDepth, dueBy, learnFrom, nothingKnown, stepOfText } from "../../assets/js/known_steps.js";

function known() {
  const all = nothingKnown();
  learnFrom(all, { first: 0, at: 4, bars: [2, 1], times: [8, 9], nodes: [16, 1], lengths: [5, 2] });
  learnFrom(all, { first: 2, at: 11, bars: [3], times: [7], nodes: [16], lengths: [6] });
  return all;
}

test("lines of an answer add up", () => {
  assert.deepEqual(known().bars, [2, 1, 3]);
  assert.deepEqual(known().ends, [9, 11, 17]);
});

test("a character belongs to the step that it came in", () => {
  assert.equal(stepOfText(known(), 3), null); // with the prompt
  assert.deepEqual(stepOfText(known(), 4), { step: 0, from: 4, to: 9 });
  assert.deepEqual(stepOfText(known(), 10), { step: 1, from: 9, to: 11 });
  assert.equal(stepOfText(known(), 17), null);
});

test("a depth counts the steps that had accepted the one before it", () => {
  assert.deepEqual(acceptedByDepth(known()), [[2, 2], [2, 1], [1, 0]]);
  assert.deepEqual(acceptedByDepth(nothingKnown()), []);
});

const STEPS = Array.from({ length: 5 }, () => ["", { ms: 10 }]);
const reel = (more) => ({ steps: STEPS, doneAt: 0, ended: false, ...more });

test("a step is due when the one before it has stood its time", () => {
  const one = reel();
  assert.equal(dueBy(one, 25, -1, () => 10, false), 1);
  assert.equal(one.doneAt, 20);
  assert.equal(dueBy(one, 29, 1, () => 10, false), 1);
  assert.equal(dueBy(one, 30, 1, () => 10, false), 2);
});

test("by hand the first step comes of itself, and no other", () => {
  assert.equal(dueBy(reel(), 1e6, -1, () => 1e9, true), 0);
  assert.equal(dueBy(reel(), 1e6, 0, () => 1e9, true), 0);
});

test("a tab that slept goes on from where it was, not at a bound", () => {
  const one = reel({ ended: true });
  assert.equal(dueBy(one, 10_000, -1, () => 400, false), 0);
  assert.equal(one.doneAt, 10_000);
});
