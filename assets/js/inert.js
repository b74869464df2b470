// Text of a model or a user is no HTML: marks that nobody sees keep Gradio's Markdown from taking it
// for that (ui/page/markup.py, whose RULES these are). Here they go into the text that comes,
// and out of what is drawn, edited and copied.
import { known } from "./page.js";

const rules = known.RULES;
const anyTag = new RegExp(rules.begins, "gi");
const besideCode = new RegExp(`${rules.fence}|${rules.begins}`, "gi");
const odd = new RegExp(rules.odd);
const drawnDollars = new RegExp(`${rules.mark}\\\\\\((.*?)\\\\\\)${rules.mark}`, "g");

export function inert(text) {
  if (odd.test(text)) return text.replace(anyTag, (all, url) => url ?? all + rules.mark);
  return text.replace(besideCode, (all, code, url) => code ?? url ?? all + rules.mark);
}

function withoutMarks(text) {
  return text.replaceAll(rules.mark, "");
}

// What the model wrote: Gradio draws no formula between single dollars, so it was given other
// delimiters, with a mark outside of each.
function unmarked(text) {
  return withoutMarks(text.replace(drawnDollars, (_all, formula) => `$${formula}$`));
}

// Out of what is drawn, edited and copied.
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

export function unmarkPage() {
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
}
