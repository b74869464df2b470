// What would have passed with another ε or δ: the step that is shown, judged anew by the sliders'
// values, without the model.
import { panel, schedule } from "./panel.js";
import { judge } from "./rule.js";

function sliderValue(id) {
  const input = document.querySelector(`#${id} input[type=range]`);
  return input && !input.disabled ? Number(input.value) : null;
}

function readSliders() {
  const epsilon = sliderValue("epsilon");
  const isLocked = document.querySelector("#lock input")?.checked;
  const delta = isLocked && epsilon !== null ? Math.min(Math.sqrt(epsilon), 0.999) : sliderValue("delta");
  const isOther = panel.data && (Math.abs(epsilon - panel.data.epsilon) > 1e-6 || Math.abs(delta - panel.data.delta) > 1e-3);
  panel.asIf = epsilon !== null && delta !== null && isOther ? { epsilon, delta } : null;
  schedule();
}

// The step as it is drawn: as it was, unless it stands still and the sliders say otherwise.
export function judged(step) {
  const isStill = panel.pinned !== null || panel.data.ended;
  return panel.asIf && isStill ? judge(step, panel.asIf) : step;
}

document.addEventListener("input", (event) => {
  if (event.target.closest?.("#epsilon, #delta, #lock")) requestAnimationFrame(readSliders);
});
