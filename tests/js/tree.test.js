// Where the nodes of a tree stand, and which are drawn when it is folded.
import assert from "node:assert/strict";
import { test } from "node:test";
import { highOf, places, testedNodes } from "../../assets/js/places.js";
import { judge } from "../../assets/js/rule.js";
import { depthOf, markOf, stateWords, tipLines } from "../../assets/js/words.js";

//   0 ─ 1 ─ 3 ─ 5
//   │   └ 4
//   └ 2
const PARENTS = [-1, 0, 0, 1, 1, 3];
const ALL = PARENTS.map((_, node) => node);

test("a leaf has a row of its own, a parent its first child's", () => {
  const { depth, row, rows, columns } = places(PARENTS, ALL);
  assert.deepEqual(depth, [0, 1, 1, 2, 2, 3]);
  assert.deepEqual(row, [0, 0, 2, 0, 1, 0]);
  assert.equal(rows, 3);
  assert.equal(columns, 4);
});

test("no two nodes stand in one place", () => {
  const parents = Array.from({ length: 64 }, (_, node) => (node ? Math.floor((node - 1) / 3) : -1));
  const { depth, row } = places(parents, parents.map((_, node) => node));
  assert.equal(new Set(depth.map((column, node) => `${column}.${row[node]}`)).size, 64);
});

test("folded, what was not reached takes no row", () => {
  const step = { parent: PARENTS, state: "aarrru" };
  const drawn = testedNodes(step);
  assert.deepEqual(drawn, [0, 1, 2, 3, 4]);
  assert.equal(places(PARENTS, drawn).columns, 3);
  assert.ok(highOf(PARENTS) > highOf([-1, 0, 1]));
});

test("with another rule the longest path passes, then the likelier one", () => {
  const step = {
    parent: [-1, 0, 0, 1, 2],
    state: "arrue",
    threshold: [0.5, 0.5, 0.5, null, null],
    entropy: [1, 1, 1, null, null],
    p: [null, 0.2, 0.3, 0.2, 0.2],
  };
  const stricter = judge(step, { epsilon: 0.9, delta: 0.999 });
  assert.equal(stricter.accepted, 0);
  const looser = judge(step, { epsilon: 0.1, delta: 0.9 });
  assert.equal(looser.state, "araua");
  assert.equal(looser.accepted, 2);
  assert.equal(looser.threshold[0], 0.1);
  const all = judge(step, { epsilon: 0, delta: 0.9 });
  assert.equal(all.state, "araua"); // everything passes, by no distance that could be told
  assert.deepEqual(all.margin, [null, null, null, null, null]);
});

test("a node says which of two draft models proposed it, and whether the text did too", () => {
  const step = { parent: [-1, 0, 0, 0], state: "arrr", source: "-fsM", rank: null, p: null, same: null };
  const said = [1, 2, 3].map((node) => tipLines({ temperature: 0 }, step, node)[1]);
  assert.deepEqual(said, [
    "proposed by the first draft model",
    "proposed by the second draft model",
    "proposed by both draft models and the text",
  ]);
  assert.deepEqual([1, 2, 3].map((node) => markOf(step, node)), ["✗", "✗", "✗ ”"]);
});

test("a node says how it fared", () => {
  const step = { parent: [-1, 0, 1], state: "aru", rank: [null, 0, 2], p: [null, 0.09, null], same: [null, false, null] };
  const data = { temperature: 0 };
  assert.equal(depthOf(step, 2), 2);
  assert.equal(markOf(step, 1), "✗ 9%");
  assert.equal(markOf(step, 2), "#2");
  assert.match(stateWords(data, step, 1), /not the model's first choice/);
});
