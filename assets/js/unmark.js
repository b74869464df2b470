// The marks that keep text from being HTML (inert.js) go out of what is drawn, edited and copied.
import { rules, unmarked, withoutMarks } from "./inert.js";

function unmark(node) {
  if (node.nodeType === Node.TEXT_NODE) {
    // Mermaid has still to read its own, and would take it for HTML
    const isSource = node.parentElement?.closest(".mermaid:not([data-processed])");
    if (!isSource && node.data.includes(rules.mark)) node.data = withoutMarks(node.data);
    return;
  }
  const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) unmark(texts.currentNode);
  const box = node.matches?.("textarea") ? node : node.querySelector?.("textarea");
  if (!box?.value.includes(rules.mark)) return;
  box.value = unmarked(box.value);
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

new MutationObserver((changes) => {
  for (const { type, target, addedNodes } of changes) {
    if (type === "characterData") unmark(target);
    for (const node of addedNodes) unmark(node);
  }
}).observe(document.getElementById("conversation"), {
  childList: true,
  characterData: true,
  subtree: true,
});

// Gradio's Copy hands over what it was given; without a clipboard it selects that in a box.
if (navigator.clipboard) {
  const write = navigator.clipboard.writeText.bind(navigator.clipboard);
  navigator.clipboard.writeText = (text) => write(unmarked(text));
}
window.addEventListener("copy", (event) => {
  const { value, selectionStart, selectionEnd } = event.target;
  if (!value?.includes(rules.mark)) return;
  event.clipboardData.setData("text/plain", unmarked(value.slice(selectionStart, selectionEnd)));
  event.preventDefault();
});
