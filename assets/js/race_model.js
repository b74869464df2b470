// A race on the clock of a named GPU: the same steps, with the times of that.
import { number } from "./format.js";
import { gpuMs } from "./gpu.js";

// The result with the times of that GPU.
export function modelled(found, of) {
  const sides = found.sides.map((side) => modelledSide(side, of));
  const [plain, drafted] = sides;
  const speedup = plain.rate && drafted.rate ? drafted.rate / plain.rate : null;
  const overhead = speedup === null ? null : drafted.step_ms / plain.step_ms;
  const made = { ...found, sides, speedup, overhead, is_slower: speedup !== null && speedup < 1 };
  return { ...made, verdict: speedup === null ? found.verdict : modelledVerdict(made, of) };
}

function modelledSide(side, of) {
  let ms = gpuMs(of, 1); // of the prompt
  const frames = side.frames.map(([, text, tokens, nodes]) => {
    ms += nodes ? gpuMs(of, nodes) : 0;
    return [ms, text, tokens];
  });
  const first = gpuMs(of, 1);
  const step = side.steps ? (ms - first) / side.steps : null;
  const rate = step && side.per_step ? (side.per_step / step) * 1000 : null;
  return { ...side, frames, first_ms: first, total_ms: ms, step_ms: step, rate };
}

function modelledVerdict({ sides, base: against, speedup, overhead, acceleration_rate, hedge }, of) {
  const name = sides[1].name;
  const base = against || "plain decoding";
  const where = `on an ${of.gpu} (${of.size}, ${of.precision})`;
  if (speedup >= 1) {
    return `${name} would be ${number(speedup, 2)}× as fast as ${base} ${where}.${hedge}`;
  }
  const cost = `A step costs ${number(overhead, 2)} plain steps`;
  const gives = `gives ${number(acceleration_rate, 2)} tokens`;
  const causes = base === "plain decoding" ? ` ${cost} and ${gives}.` : "";
  const ratio = `${number(speedup, 2)}×`;
  return `${name} would be slower than ${base} ${where}: ${ratio}.${causes}${hedge}`;
}
