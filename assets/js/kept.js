// What the browser keeps of settings under KEY: the value is JSON, written down as it comes. PANEL: the
// id of the accordion that has them. And what Gradio's settings lack.
import { store } from "./page.js";

export function begin({ given, value, watch }) {
  const { KEY, PANEL } = given;
  watch(() => value() && store("localStorage", KEY, value()));
  tellOpen(PANEL);
}

// Gradio does not tell a screen reader whether they are open.
function tellOpen(id) {
  const opener = document.querySelector(`#${id} > .label-wrap`);
  if (!opener) return void setTimeout(tellOpen, 50, id); // it is not there yet
  const say = () => opener.setAttribute("aria-expanded", String(opener.matches(".open")));
  new MutationObserver(say).observe(opener, { attributeFilter: ["class"] });
  say();
}

// On a narrow page the composer lies over the settings where they open.
document.addEventListener("click", ({ target }) => {
  const opener = target.closest?.("#settings > .label-wrap");
  requestAnimationFrame(() => opener?.matches(".open") && opener.parentElement.scrollIntoView());
});

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
