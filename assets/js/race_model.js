// A race on the clock of a named GPU: the same steps, with the times of that.
import { duration, number } from "./format.js";
import { gpuMs } from "./pace.js";

const PLAIN = "plain decoding";

// The result with the times of that GPU.
export function modelled(found, of) {
  const sides = found.sides.map((side) => modelledSide(side, of));
  const [plain, drafted] = sides;
  const speedup = plain.rate && drafted.rate ? drafted.rate / plain.rate : null;
  const overhead = speedup === null ? null : drafted.step_ms / plain.step_ms;
  const ratio = found.is_race ? plain.total_ms / drafted.total_ms : speedup;
  const made = { ...found, sides, speedup, overhead, ratio, is_slower: ratio !== null && ratio < 1 };
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

// It follows from the race that is shown, as the verdict on what was measured does.
function modelledVerdict(found, of) {
  const { sides, base = PLAIN, ratio: times, is_race, overhead, acceleration_rate, hedge } = found;
  const [left, { name, total_ms }] = sides;
  const race = is_race ? `: ${duration(total_ms)} against ${duration(left.total_ms)}` : ", per token";
  const where = `on an ${of.gpu} (${of.size}, ${of.precision})`;
  if (times >= 1) {
    return `${name} would be ${number(times, 2)}× as fast as ${base} ${where}${race}.${hedge}`;
  }
  const cost = `A step costs ${number(overhead, 2)} plain steps`;
  const gives = `gives ${number(acceleration_rate, 2)} tokens`;
  const causes = base === PLAIN ? ` ${cost} and ${gives}.` : "";
  return `${name} would be slower than ${base} ${where}, ${number(times, 2)}×${race}.${causes}${hedge}`;
}
