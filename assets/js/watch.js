// The answers that other programs ask for over the API, watched live in the microscope. The button
// stands there once one has asked; nothing of it is stored.
import { button, hide, say } from "./elements.js";
import { every, onValue, trigger } from "./panel.js";

const LOOK_EVERY = 400; // ms
const WORDS = { true: "■ stop watching other programs", false: "▶ watch what other programs ask" };
let isOn = false;
let isSeen = false; // such an answer stands in the panel
export const watching = button("watch", WORDS.false, () => watch(!isOn));
hide(watching, true);

function tell(now) {
  [isOn, isSeen] = [now, false];
  say(watching, WORDS[isOn]);
  watching.setAttribute("aria-pressed", String(isOn));
}

function watch(now) {
  tell(now);
  trigger(isOn ? "watch" : "newest", { begins: true });
}

onValue((line) => {
  if (isOn && isSeen && !line?.watched) tell(false); // another answer was chosen
  isSeen = isOn && Boolean(line?.watched);
});

window.addEventListener("medusa-watched", () => hide(watching, false));
window.addEventListener("medusa-taken", ({ detail }) => {
  if (isOn && detail) watch(false); // somebody writes here
});
every(LOOK_EVERY, () => {
  if (isOn) trigger("watch", {});
});
