// What the parts of the page tell each other, what each of them may ask, what the program told them,
// and what this browser keeps.
export const page = {
  model: null, // {isDemo, isGuest, model} that is loaded, as far as the server has said
  said: "", // the answer that runs, as it is handed to Gradio's Markdown
};

let taken = ""; // the message that is under way

export function messageUnderWay() {
  return taken;
}

export function setUnderWay(text) {
  taken = text;
  tell("medusa-taken", text); // first.js keeps it over a reload
}

export function tell(name, detail) {
  window.dispatchEvent(new CustomEvent(name, { detail }));
}

// A line over the page. level: "info" or "warning"; seconds until it goes, 0 for never (first.js).
export function notify(level, text, seconds) {
  tell("medusa-notice", [level, text, seconds]);
}

// The path that the page has behind a proxy, without its last slash.
export function pagePath() {
  return (window.gradio_config?.root ?? "").replace(/\/$/, "");
}

// Resolves once all that was posted in the chat's turn is answered (link.js).
export async function answered() {
  const asked = {};
  tell("medusa-answered", asked);
  await asked.answered;
}

// What the program tells its scripts from the start, by name: JSON in the page (ui/page/shell.py).
const knownPlace = globalThis.document?.getElementById("known");
export const known = JSON.parse(knownPlace?.textContent ?? "{}");

// What this browser keeps, in localStorage or sessionStorage. One that keeps nothing goes on without.
export function store(place, key, value) {
  try {
    window[place].setItem(key, value);
  } catch {
    // it is switched off, or full
  }
}

export function stored(place, key) {
  try {
    return window[place].getItem(key);
  } catch {
    return null;
  }
}
