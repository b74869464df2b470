// The switch between the system's colours, light and dark; assets/js/first.js applies them.
const LOOKS = { system: "Colours: system", light: "Colours: light", dark: "Colours: dark" };
const NEXT = { system: "light", light: "dark", dark: "system" };
const PATHS = {
  system: "M3 4h18v12H3zM8 20h8M12 16v4",
  light: "M12 7a5 5 0 1 0 0 10a5 5 0 1 0 0-10M12 1v3M12 20v3M1 12h3M20 12h3M4.5 4.5l2 2M17.5 17.5l2 2M4.5 19.5l2-2M17.5 6.5l2-2",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4A8.5 8.5 0 1 0 20 14.5z",
};
const SVG = "http://www.w3.org/2000/svg";
const root = element.querySelector(".look-block") || element;
const button = document.createElement("button");
const icon = document.createElementNS(SVG, "svg");
const path = document.createElementNS(SVG, "path");
button.type = "button";
button.className = "tool";
icon.setAttribute("viewBox", "0 0 24 24");
icon.setAttribute("aria-hidden", "true");
icon.append(path);
button.append(icon);
root.replaceChildren(button);

function show(look) {
  path.setAttribute("d", PATHS[look]);
  button.setAttribute("aria-label", LOOKS[look]);
  button.title = LOOKS[look];
  button.dataset.look = look;
}

function choose(look) {
  document.documentElement.dataset.look = look;
  show(look);
  try {
    localStorage.setItem("medusa-look", look);
  } catch {
    // storage is switched off: the choice lasts as long as the page
  }
}

show(document.documentElement.dataset.look || "system");
button.addEventListener("click", () => choose(NEXT[button.dataset.look]));
