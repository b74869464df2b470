// Where the nodes of a tree stand: a column for each depth, a row for each leaf.
export const isFinger = Boolean(globalThis.matchMedia?.("(pointer: coarse)").matches);
export const ROW = isFinger ? 24 : 16; // a finger is thick
export const CHIP = ROW - 2;
export const LINE = CHIP / 2 + 3; // of a chip's text, below its top
export const TOP = 22;
export const GAP = 26;
export const SMALLEST = 0.86;

// The nodes of a folded tree: the path and what was tested beside it.
export function testedNodes(step) {
  return step.parent.map((_, node) => node).filter((node) => step.state[node] !== "u");
}

// Pixels of a tree whose chips are as small as they get.
export function highOf(parents) {
  const leaves = parents.length - new Set(parents.slice(1)).size;
  return (leaves * ROW + TOP + ROW) * SMALLEST + 2;
}

export function places(parents, drawn) {
  const children = parents.map(() => []);
  drawn.forEach((node) => parents[node] >= 0 && children[parents[node]].push(node));
  const depth = [];
  const row = [];
  let rows = 0;
  drawn.forEach((node) => (depth[node] = parents[node] < 0 ? 0 : depth[parents[node]] + 1));
  const visit = (node) => {
    if (!children[node].length) row[node] = rows++;
    children[node].forEach(visit);
    if (children[node].length) row[node] = row[children[node][0]];
  };
  visit(0);
  return { depth, row, rows, columns: Math.max(...drawn.map((node) => depth[node])) + 1 };
}

// The line to a chip at `x` from the one before it, a gap away: from one height to another.
export function branch(x, gap, from, to) {
  const bend = gap * 0.6;
  return `M${x - gap} ${from}C${x - gap + bend} ${from} ${x - bend} ${to} ${x} ${to}`;
}
