// The panel of the microscope: its block, the answer it shows, and what is known of its steps.
import { blockOf } from "./block.js";
import { inNextFrame } from "./elements.js";
import { nothingKnown } from "./known_steps.js";
import { makePen, tokenFont } from "./measure.js";
import { emptyChart } from "./rates.js";

export const { root, trigger, sends, onValue, setValue, every } = blockOf("tree");
export const NARROW = 480; // below, the tree folds to what was tested
export const LARGEST = 1.7; // how much larger than usual a small tree is drawn at most
export const FONT = 10.5; // px, of a chip's text at its usual size
export const pen = makePen(tokenFont(FONT));

export const panel = {
  data: null, // the newest line
  shown: null, // the step that is drawn
  live: null, // the newest step
  known: nothingKnown(), // by step, as far as this answer's lines told
  steps: new Map(), // by index: what was received
  pinned: null, // the step the user looks at, while newer ones arrive
  flying: null, // the step that was asked for: {step, at, isDropped}
  play: null, // {step, due}: the step that is shown, and when the next one follows
  view: "tree",
  wantsFold: null, // null: by width
  shape: null, // what the layout was made for
  chips: [],
  active: 0, // the node that has the keyboard
  hovered: null,
  quiet: null, // the node under the pointer that needs no tooltip
  asked: null, // {answer, step, node, data, view}: what the card is about
  asIf: null, // {epsilon, delta} while they differ from the answer's own
  chart: emptyChart(),
  line: { total: 0, pitch: 14, now: 0, from: 0 }, // of the timeline
  scrolled: 0, // where the timeline is scrolled to, or will be at the end of this frame
  isScrolledByHand: false, // the tree
  room: 0, // px that a tree has in height, beside an open card or not
  scale: 1, // of the tree
  largest: LARGEST, // no step of an answer is drawn larger than one before
  widest: 0, // px that the longest token of the answer needs, at FONT
  draw: () => {},
  closeCard: () => {},
};
export const schedule = inNextFrame(() => panel.draw());

// Widths of what is drawn into, read when they change: asked for while something is being
// written, they would cost the whole page's layout each time.
export const widthsOf = new Map();
export function widthIn(node) {
  if (!widthsOf.get(node)) widthsOf.set(node, node.clientWidth);
  return widthsOf.get(node);
}
