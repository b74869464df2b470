// The answers that other programs ask for over the API, watched live in the microscope. The button
// stands there once one has asked; nothing of it is stored.
import { hide } from "./draw.js";
import { button, say } from "./elements.js";
import { every, trigger } from "./panel.js";

const LOOK_EVERY = 400; // ms
const WORDS = { true: "■ stop watching other programs", false: "▶ watch what other programs ask" };
let isOn = false;
export const watching = button("watch", WORDS.false, () => watch(!isOn));
hide(watching, true);

function watch(now) {
  isOn = now;
  say(watching, WORDS[isOn]);
  watching.setAttribute("aria-pressed", String(isOn));
  trigger(isOn ? "watch" : "newest");
}

window.addEventListener("medusa-watched", () => hide(watching, false));
window.addEventListener("medusa-taken", ({ detail }) => {
  if (isOn && detail) watch(false); // somebody writes here
});
every(LOOK_EVERY, () => {
  if (isOn) trigger("watch");
});
