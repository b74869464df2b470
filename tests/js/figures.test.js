// Figures in words, rates over an answer, and what a named GPU would do.
import assert from "node:assert/strict";
import { test } from "node:test";
import { count, counted, duration, number, percent, quoted } from "../../assets/js/format.js";
import { emptyChart, fillChart, niceAbove, rates } from "../../assets/js/rates.js";

const TIMES = { nodes: [1, 16, 64], ms: { "7B|RTX 4090|fp16": [16, 18, 30] }, sizes: ["7B"], gpus: ["RTX 4090"], precisions: ["fp16"] };
globalThis.document = { getElementById: () => ({ textContent: JSON.stringify({ GPU_TIMES: TIMES }) }) };
const { gpuMs, slowness, slowWords } = await import("../../assets/js/pace.js");
const { modelled } = await import("../../assets/js/race_model.js");
const GPU = { size: "7B", gpu: "RTX 4090", precision: "fp16", nodes: 64, clock: "slow" };

test("what is not known is a dash", () => {
  assert.deepEqual([count(null), number(undefined, 1), percent(null)], ["–", "–", "–"]);
});

test("a share has as many digits as say something", () => {
  assert.deepEqual([0, 0.0004, 0.034, 0.0996, 1].map(percent), ["0.0%", "<0.1%", "3.4%", "10%", "100%"]);
});

test("counts have their noun in the right number", () => {
  assert.deepEqual([counted(1, "step"), counted(2, "step"), count(1234)], ["1 step", "2 steps", "1,234"]);
});

test("a quoted token cannot turn the line around", () => {
  assert.equal(quoted("ab"), "\u2068ab\u2069");
});

test("the rates of steps that merge keep every token", () => {
  const chart = emptyChart();
  const bars = Array.from({ length: 1000 }, (_, step) => (step % 3) + 1);
  const times = bars.map(() => 20);
  fillChart(chart, bars, times);
  assert.ok(chart.sums.length < 96);
  const total = bars.reduce((sum, tokens) => sum + tokens, 0);
  assert.ok(Math.abs(chart.sums.reduce((sum, tokens) => sum + tokens, 0) - total) < 1e-6);
  assert.ok(Math.abs(chart.seconds - 20) < 1e-6);
  for (const [, rate] of rates(chart)) assert.ok(Math.abs(rate - 100) < 5);
});

test("a time has three digits", () => {
  assert.deepEqual([4.5612, 444.4, 1321, 59880].map(duration), ["4.56 ms", "444 ms", "1.32 s", "59.9 s"]);
  assert.equal(duration(null), "–");
});

test("an axis ends at a round figure above the most", () => {
  assert.deepEqual([7, 95, 101, 640].map(niceAbove), [8, 100, 150, 800]);
});

test("a step's time lies between the sizes that are known", () => {
  assert.equal(gpuMs(GPU, 1), 16);
  assert.equal(gpuMs(GPU, 64), 30);
  assert.equal(gpuMs(GPU, 40), 24);
  assert.equal(gpuMs(GPU, 100), 30);
});

test("slow motion shows at most six steps a second", () => {
  assert.equal(slowness(GPU), Math.ceil(1000 / 6 / 16));
  assert.equal(slowWords({ ...GPU, clock: "own" }), "");
});

test("a race on a GPU's clock gives the same tokens its times", () => {
  const frames = [[5, "a", 1, 0], [9, "b", 2, 64], [13, "c", 3, 64]];
  const plain = { name: "Plain", frames: [[5, "a", 1, 0], [9, "b", 1, 1]], steps: 1, per_step: 1, rate: 1 };
  const drafted = { name: "Medusa", frames, steps: 2, per_step: 2.5, rate: 1 };
  const found = { sides: [plain, drafted], acceleration_rate: 2.5, hedge: "", verdict: "" };
  const race = modelled(found, GPU);
  assert.deepEqual(race.sides[1].frames.map(([ms]) => ms), [16, 46, 76]);
  assert.equal(race.overhead, 30 / 16);
  assert.ok(Math.abs(race.speedup - 2.5 / (30 / 16)) < 1e-9);
  assert.match(race.verdict, /1\.33× as fast as plain decoding on an RTX 4090 .*, per token\./);
  const told = modelled({ ...found, is_race: true }, GPU).verdict; // of the times that the race shows
  assert.match(told, /^Medusa would be slower than plain decoding .*, 0\.42×: 76 ms against 32 ms\./);
});
