// What would have passed with another ε or δ: the step that is shown, judged anew by the sliders'
// values, without the model. The rule: p > min(ε, δ·exp(−H)), the longest path, then the likeliest.
let asIf = null; // {epsilon, delta} while they differ from the answer's own

function sliderValue(id) {
  const input = document.querySelector(`#${id} input[type=range]`);
  return input && !input.disabled ? Number(input.value) : null;
}

function readSliders() {
  const epsilon = sliderValue("epsilon");
  const isLocked = document.querySelector("#lock input")?.checked;
  const delta = isLocked && epsilon !== null ? Math.min(Math.sqrt(epsilon), 0.999) : sliderValue("delta");
  const isOther = data && (Math.abs(epsilon - data.epsilon) > 1e-6 || Math.abs(delta - data.delta) > 1e-3);
  asIf = epsilon !== null && delta !== null && isOther ? { epsilon, delta } : null;
  schedule();
}

// The step as it is drawn: as it was, unless it stands still and the sliders say otherwise.
function judged(step) {
  const isStill = pinned !== null || data.ended;
  if (!asIf || !isStill || !step.parent || !isTypical(step) || !step.entropy || !step.p) return step;
  const { epsilon, delta } = asIf;
  const limits = step.entropy.map((h) => (h === null ? null : delta * Math.exp(-h)));
  const threshold = limits.map((limit) => (limit === null ? null : Math.min(epsilon, limit)));
  // Where everything passes (a threshold of 0) or nothing does there is no distance to tell.
  const margin = step.parent.map((parent, node) =>
    node && threshold[parent] && step.p[node]
      ? Math.max(-99, Math.min(99, Math.log(step.p[node] / threshold[parent])))
      : null,
  );
  const isOver = (node) => threshold[step.parent[node]] !== null && step.p[node] > threshold[step.parent[node]];
  const taken = bestPath(step, isOver);
  const state = step.parent
    .map((parent, node) => (taken.has(node) ? "a" : taken.has(parent) ? "r" : "u"))
    .join("");
  const binds = limits.map((limit) => (limit === null ? "-" : limit < epsilon ? "d" : "e")).join("");
  return { ...step, threshold, margin, state, binds, accepted: taken.size - 1 };
}

function bestPath(step, passes) {
  const depth = [0];
  const worth = [0];
  let best = 0;
  for (let node = 1; node < step.parent.length; node++) {
    const parent = step.parent[node];
    if (depth[parent] === undefined || !passes(node)) continue;
    depth[node] = depth[parent] + 1;
    worth[node] = worth[parent] + Math.log(step.p[node]);
    const isLonger = depth[node] > depth[best];
    if (isLonger || (depth[node] === depth[best] && worth[node] > worth[best])) best = node;
  }
  const taken = new Set();
  for (let node = best; node >= 0; node = step.parent[node]) taken.add(node);
  return taken;
}

document.addEventListener("input", (event) => {
  if (event.target.closest?.("#epsilon, #delta, #lock")) requestAnimationFrame(readSliders);
});
