// What the picture shows, and the keyboard: what each key does, and a small list of both.
import { blockOf } from "./block.js";
import { button, make } from "./elements.js";

const { root } = blockOf("keys");
const PICTURE = [
  ["✓ green", "accepted: the model says the same"],
  ["✗ pink", "tested and rejected"],
  ["grey", "not reached: what stands before it was rejected"],
  ["+1", "the model's own next token, behind the accepted ones"],
  ["”", "proposed by the text: it stood behind the same words before"],
  ["a column", "the guesses of one head, a small network for the token so many places ahead"],
  ["a line below", "how sure the head was"],
  ["a bar", "a step: one pass of the model (the backbone), as high as the tokens it gave"],
];
const KEYS = [
  ["Enter", "send; while an answer runs: send after it"],
  ["Shift + Enter", "new line"],
  ["Esc", "stop the answer"],
  ["Alt + R", "regenerate the last answer"],
  ["↑ in an empty box", "edit your last message"],
  ["Ctrl + Enter and Esc", "in a message that is edited: done, or leave it"],
  ["Ctrl + Shift + O", "new chat"],
  ["Space", "play and pause the steps; step by step: the next one"],
  ["← and →", "one step back or forward in the timeline"],
  ["↑, ↓, F2 and Del", "in the list of conversations: move, rename, delete"],
  ["/", "write a message"],
  ["?", "this list"],
];
const OWN_ARROWS =
  "input, textarea, select, [contenteditable=true], [role=slider], [role=tab], [role=radio]," +
  "[role=listbox], [role=option], [role=menu], [role=tree], .tree-box, svg.bars";

const list = make("dialog", "");
list.id = "shortcuts";
list.setAttribute("aria-label", "The picture and the keyboard");

function terms(title, rows) {
  const table = make("dl", "");
  for (const [term, what] of rows) {
    const name = make("dt", "");
    name.append(make("kbd", "", term));
    table.append(name, make("dd", "", what));
  }
  list.append(make("h2", "", title), table);
}

terms("The picture", PICTURE);
terms("Keyboard", KEYS);
list.append(button("", "Close", () => list.close()));

function open() {
  list.showModal();
  list.scrollTop = 0; // not where its button is, which has the keyboard
  return true;
}

const help = button("tool", "?", open);
help.title = "The picture and the keyboard";
help.setAttribute("aria-label", "The picture and the keyboard: what you see, what each key does");
root.replaceChildren(help, list);

function isWriting(node) {
  return Boolean(node?.closest?.("input, textarea, select, [contenteditable=true]"));
}

function press(id) {
  const button = document.getElementById(id);
  const isThere = button && !button.disabled && button.offsetParent !== null;
  if (isThere) button.click();
  return Boolean(isThere);
}

function write() {
  const box = document.querySelector("#box textarea");
  if (!box || box.offsetParent === null) return false;
  box.focus();
  return true;
}

function step(key) {
  const bars = document.querySelector("#tree svg.bars");
  if (!bars || bars.getBoundingClientRect().width === 0) return false;
  bars.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
  return true;
}

// Gradio's buttons of the message that is edited.
function endEdit(name) {
  document.querySelector(`#history button[aria-label="${name}"]`)?.click();
  return true;
}

// Where a click leaves the keyboard nowhere, for its button goes or is switched off, one goes on writing.
const LEAVES_NOTHING =
  "#examples button, #regenerate, #proceed, #undo, #redo, #stop:focus," +
  "#history button:is([aria-label=Submit], [aria-label=Cancel])";
document.addEventListener("click", ({ target }) => {
  if (matchMedia("(hover: hover)").matches && target.closest?.(LEAVES_NOTHING)) write();
});

function editLast() {
  const mine = document.querySelectorAll("#history .message-row.user-row");
  const bar = mine[mine.length - 1]?.nextElementSibling;
  bar?.querySelector('button[aria-label="Edit"]')?.click();
  requestAnimationFrame(() => document.querySelector("#history .edit-textarea")?.focus());
  return Boolean(bar);
}

function act(event) {
  const { key, target } = event;
  const isPlain = !event.ctrlKey && !event.altKey && !event.metaKey;
  if (target.closest?.(".edit-textarea")) {
    if (key === "Escape") return endEdit("Cancel");
    return key === "Enter" && (event.ctrlKey || event.metaKey) && endEdit("Submit");
  }
  if (key === "ArrowUp" && isPlain && target.matches?.("#box textarea") && !target.value) return editLast();
  if (key === "Escape" && isPlain) {
    const isOpen = target.closest?.("[role=combobox][aria-expanded=true], [role=listbox]");
    return !isOpen && press("stop");
  }
  if (event.ctrlKey && event.shiftKey && key.toLowerCase() === "o") return press("clear") && write();
  if (event.altKey && !event.ctrlKey && event.code === "KeyR") return press("regenerate");
  if (!isPlain || isWriting(target)) return false;
  if (key === "/") return write();
  if (key === "?") return open();
  if (key === " ") return !target.closest?.("button, a, summary, [role=button], [role=tree], svg.bars") && step(key);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    return !target.closest?.(OWN_ARROWS) && step(key);
  }
  return false;
}

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.isComposing || list.open) return;
  if (act(event)) event.preventDefault();
});
