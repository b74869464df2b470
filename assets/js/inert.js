// Text of a model or a user is no HTML: marks that nobody sees keep Gradio's Markdown from taking it
// for that (ui/page/markup.py, whose RULES these are). Here they go into the text that comes; out
// of what is drawn, edited and copied they go in unmark.js.
import { known } from "./known.js";

export const rules = known.RULES;
const anyTag = new RegExp(rules.begins, "gi");
const besideCode = new RegExp(`${rules.fence}|${rules.begins}`, "gi");
const odd = new RegExp(rules.odd);
const drawnDollars = new RegExp(`${rules.mark}\\\\\\((.*?)\\\\\\)${rules.mark}`, "g");

export function inert(text) {
  if (odd.test(text)) return text.replace(anyTag, (all, url) => url ?? all + rules.mark);
  return text.replace(besideCode, (all, code, url) => code ?? url ?? all + rules.mark);
}

export function withoutMarks(text) {
  return text.replaceAll(rules.mark, "");
}

// What the model wrote: Gradio draws no formula between single dollars, so it was given other
// delimiters, with a mark outside of each.
export function unmarked(text) {
  return withoutMarks(text.replace(drawnDollars, (_all, formula) => `$${formula}$`));
}
