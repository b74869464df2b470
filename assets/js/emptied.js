// A slider's number box that is emptied keeps the slider's value, and a number beyond the slider's end
// becomes that end: Gradio would post them, which its server refuses with a traceback. What is typed
// next counts; left empty, the value stands again.
function rangeBeside(box) {
  if (box.type !== "number") return null;
  return box.closest(".block")?.querySelector("input[type=range]") ?? null;
}

window.addEventListener(
  "input",
  (event) => {
    const box = event.target;
    const range = rangeBeside(box);
    if (!range) return;
    if (box.value === "") return event.stopImmediatePropagation();
    const held = Math.min(Math.max(Number(box.value), Number(range.min)), Number(range.max));
    if (held !== Number(box.value)) box.value = held;
  },
  true,
);
window.addEventListener(
  "blur",
  (event) => {
    const range = event.target instanceof Element && rangeBeside(event.target);
    if (range && event.target.value === "") event.target.value = range.value;
  },
  true,
);
