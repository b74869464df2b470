// The same step as the backbone sees it (the paper's Figure 2): which keys each node attends to.
import { draw, make, say, scrollRegion, set } from "./elements.js";
import { count, quoted } from "./format.js";
import { MARKS, STATES } from "./words.js";

// {box, scroll, svg, note, draw, forget}. pen: of the text in it.
export function makeMask(pen) {
  const box = make("div", "mask-box");
  const svg = draw("svg", { class: "mask", role: "img", "aria-label": "nothing is drawn yet" });
  const note = make("p", "mask-note");
  const scroll = scrollRegion("mask-scroll", "Attention mask of one step, scrollable");
  let shape = null;
  scroll.append(svg);
  box.append(note, scroll);
  return {
    ...{ box, scroll, svg, note },
    draw(data, step, wide) {
      const key = `${data.answer}|${step.index}|${wide}`;
      if (key === shape) return;
      shape = key;
      drawMask(svg, pen, step, wide);
      describeMask(svg, note, step);
    },
    forget: () => (shape = null),
  };
}

function ancestorsOf(step, node) {
  const found = [];
  for (let at = node; at >= 0; at = step.parent[at]) found.push(at);
  return found.reverse();
}

function drawMask(svg, pen, step, wide) {
  const n = step.parent.length;
  const [names, places, prefix] = n > 40 ? [84, 36, 32] : [104, 44, 46];
  const cell = Math.max(7, Math.min(22, (wide - names - places - prefix - 8) / n));
  const tall = Math.max(cell, 11);
  const left = names + places;
  const top = cell >= 11 ? 74 : 30;
  const x = (node) => left + prefix + 4 + node * cell;
  const y = (node) => top + node * tall;
  const all = { wide: x(n) + (cell >= 11 ? 44 : 2), high: y(n) + 4 };
  const parts = [];
  const text = (content, attributes) => parts.push(draw("text", attributes, content));
  text("node", { class: "head", x: 2, y: top - 6 });
  text("position", { class: "head end", x: left - 6, y: top - 6 });
  text("before", { class: "head middle", x: left + prefix / 2, y: top - 18 });
  text(count(step.prefix), { class: "head middle", x: left + prefix / 2, y: top - 6 });
  for (let key = 0; key < n; key++) {
    const middle = x(key) + cell / 2 + 3.5;
    if (cell >= 11) {
      const turn = { class: "name", transform: `translate(${middle} ${top - 5}) rotate(-60)` };
      text(pen.cut(step.text[key], 68), turn);
    } else if (key % 8 === 0) text(String(key), { class: "head middle", x: x(key) + cell / 2, y: top - 6 });
  }
  for (let node = 0; node < n; node++) {
    const state = STATES[step.state[node]];
    const base = y(node) + tall / 2 + 3.5;
    const row = draw("g", { class: `row ${state}`, "data-q": node });
    const seen = ancestorsOf(step, node);
    const words = seen.map((at) => quoted(step.text[at])).join(" ");
    row.append(
      draw("title", {}, `node ${node} sees the text before and ${words}`),
      draw("rect", { class: "back", x: 0, y: y(node), width: x(n), height: tall }),
      draw("text", { class: "mark", x: 2, y: base }, MARKS[step.state[node]]),
      draw("text", { class: "name", x: 14, y: base }, pen.cut(step.text[node], names - 18)),
      draw("text", { class: "place end", x: left - 6, y: base }, count(step.prefix + seen.length - 1)),
      draw("rect", { class: "cell prefix", x: left, y: y(node) + 0.5, width: prefix, height: tall - 1 }),
      ...seen.map((at) =>
        draw("rect", {
          class: at === node ? "cell self" : "cell",
          x: x(at) + 0.5,
          y: y(node) + 0.5,
          width: cell - 1,
          height: tall - 1,
          "data-k": at,
        }),
      ),
    );
    parts.push(row);
  }
  set(svg, { width: all.wide, height: all.high, viewBox: `0 0 ${all.wide} ${all.high}` });
  const grid = draw("path", { class: "grid" });
  let path = "";
  for (let node = 0; node <= n; node++) path += `M${x(node)} ${top}V${y(n)}`;
  for (let node = 0; node <= n; node++) path += `M${left} ${y(node)}H${x(n)}`;
  grid.setAttribute("d", path);
  svg.replaceChildren(...parts, grid);
  svg.setAttribute("data-step", step.index);
}

function describeMask(svg, note, step) {
  const n = step.parent.length;
  say(
    note,
    `One pass of the model checks all ${n} nodes. A row is a node, a filled cell what it sees (attends to): ` +
      `the ${count(step.prefix)} tokens before the tree, the nodes on its path, and itself. ` +
      "Its position in the text is that of its depth.",
  );
  svg.setAttribute(
    "aria-label",
    `Attention mask of step ${step.index + 1}: ${n} nodes, each sees ${step.prefix} tokens before ` +
      "the tree, its ancestors and itself",
  );
}
