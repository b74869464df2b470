// The place of the panel in an answer that was saved as a file: what the server would send stands in it.
import { blockOf } from "./block.js";

export const recorded = JSON.parse(document.getElementById("recorded").textContent);
const watchers = [];
const props = { value: JSON.stringify(recorded.line) };
const block = blockOf("tree");

function pick({ step }) {
  const line = { ...recorded.line, first: 0, bars: [], times: [], nodes: [], lengths: [] };
  const shown = step ?? recorded.steps.length - 1;
  props.value = JSON.stringify({ ...line, pinned: step !== null, step: recorded.steps[shown] });
  for (const act of watchers) act();
}

block.put(
  {
    element: document.getElementById("tree"),
    props,
    watch: (_, act) => watchers.push(act),
    trigger: (event, detail) => event === "pick" && setTimeout(pick, 0, detail),
  },
  {},
  ["newest", "pace", "pick"],
);
