// A slider's number box that is emptied keeps the slider's value: Gradio would post null for it, which
// its server refuses with a traceback. What is typed next counts; left empty, the value stands again.
function rangeBeside(box) {
  if (box.type !== "number") return null;
  return box.closest(".block")?.querySelector("input[type=range]") ?? null;
}

window.addEventListener(
  "input",
  (event) => {
    if (event.target.value === "" && rangeBeside(event.target)) event.stopImmediatePropagation();
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
