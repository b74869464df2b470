// Text that is selected in the answer that comes stays selected: Gradio draws its Markdown anew while
// it grows, and at the end in the conversation. It is found again by how much text stands before it.
import { range } from "./align.js";
import { whenDrawn } from "./drawn.js";
import { liveText } from "./tint.js";

let selected = null; // {from, to, text, before}: behind how many rows

function answers() {
  return [...document.querySelectorAll("#history .bot .message-content .md")];
}

function offsetIn(prose, node, offset) {
  const before = range(prose, 0, 0);
  before.setEnd(node, offset);
  return before.toString().length;
}

function placeIn(prose, offset) {
  const texts = document.createTreeWalker(prose, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { length } = texts.currentNode;
    if (offset <= length) return [texts.currentNode, offset];
    offset -= length;
  }
  return [prose, 0];
}

function noteSelected() {
  const live = liveText();
  const now = getSelection();
  const isInside = live?.contains(now.anchorNode) && live.contains(now.focusNode);
  if (isInside && !now.isCollapsed) {
    const from = offsetIn(live, now.anchorNode, now.anchorOffset);
    const to = offsetIn(live, now.focusNode, now.focusOffset);
    selected = { from, to, text: String(now), before: answers().length };
  } else if (live?.textContent || !now.isCollapsed) selected = null; // else the text has just gone
}

function selectAgain() {
  const isWriting = document.activeElement?.matches("textarea, input");
  if (!selected || isWriting || !getSelection().isCollapsed) return;
  const { from, to, text, before } = selected;
  for (const prose of [liveText(), ...answers().slice(before)]) {
    if (!prose?.textContent) continue;
    getSelection().setBaseAndExtent(...placeIn(prose, from), ...placeIn(prose, to));
    if (String(getSelection()) === text) return;
    getSelection().removeAllRanges();
  }
}

document.addEventListener("selectionchange", noteSelected);
whenDrawn("live-text", selectAgain);
whenDrawn("history", selectAgain);
