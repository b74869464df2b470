// What the browser keeps of settings under KEY: the value is JSON, written down as it comes. PANEL: the
// id of the accordion that has them.
import { store } from "./stored.js";

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
