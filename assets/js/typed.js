// What a user wrote is shown as it was typed: Gradio draws it as Markdown, which is hidden, and the
// text stands beside it. The conversation itself keeps the text, so editing and copying are Gradio's.
import { button, make, say, whenDrawn } from "./elements.js";

const LONG = { lines: 20, characters: 2000 }; // a message beyond either is folded
let typedRows = [];

function drawTyped() {
  const all = document.querySelectorAll("#history .message-row");
  const stale = new Set(document.querySelectorAll("#history .typed"));
  for (const [row, text] of typedRows) {
    const content = all[row]?.querySelector(".user .message-content");
    if (!content) continue;
    const shown = content.querySelector(":scope > .typed") || content.appendChild(makeTyped());
    stale.delete(shown);
    if (shown.firstChild.textContent === text) continue;
    shown.firstChild.textContent = text;
    fold(shown, isLong(text));
  }
  for (const other of stale) other.remove(); // Gradio takes a row for another message
}

function makeTyped() {
  const shown = make("div", "typed");
  const text = make("div", "as-typed");
  text.dir = "auto";
  shown.append(text, button("typed-more", "", () => turn(shown)));
  return shown;
}

function isLong(text) {
  return text.length > LONG.characters || text.split("\n").length > LONG.lines;
}

function fold(shown, isFolded) {
  const [text, more] = shown.children;
  shown.classList.toggle("is-folded", isFolded);
  more.hidden = !isLong(text.textContent);
  more.setAttribute("aria-expanded", String(!isFolded));
  say(more, isFolded ? "Show more" : "Show less");
}

function turn(shown) {
  const isFolded = !shown.matches(".is-folded");
  shown.dispatchEvent(new Event("medusa-fold", { bubbles: true }));
  fold(shown, isFolded);
  if (isFolded) shown.scrollIntoView({ block: "nearest" });
}

export function showTyped(rows) {
  typedRows = rows;
  drawTyped();
}

whenDrawn("history", drawTyped);
