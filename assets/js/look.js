// The switch between the system's colours, light and dark; assets/js/first.js applies them.
import { blockOf } from "./block.js";
import { button, icon } from "./elements.js";
import { store } from "./page.js";

const { root } = blockOf("look");
const LOOKS = { system: "Colours: system", light: "Colours: light", dark: "Colours: dark" };
const NEXT = { system: "light", light: "dark", dark: "system" };
const PATHS = {
  system: "M3 4h18v12H3zM8 20h8M12 16v4",
  light: "M12 7a5 5 0 1 0 0 10a5 5 0 1 0 0-10M12 1v3M12 20v3M1 12h3M20 12h3M4.5 4.5l2 2M17.5 17.5l2 2M4.5 19.5l2-2M17.5 6.5l2-2",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4A8.5 8.5 0 1 0 20 14.5z",
};
const changer = button("tool", "", () => choose(NEXT[changer.dataset.look]));
root.replaceChildren(changer);

function show(look) {
  changer.replaceChildren(icon(PATHS[look]));
  changer.setAttribute("aria-label", LOOKS[look]);
  changer.title = LOOKS[look];
  changer.dataset.look = look;
}

function choose(look) {
  document.documentElement.dataset.look = look;
  show(look);
  store("localStorage", "medusa-look", look);
}

show(document.documentElement.dataset.look || "system");
