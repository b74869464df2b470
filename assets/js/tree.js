// The numbers, the tree of one step and the bars of all steps, drawn from one JSON string.
// Model text is written with textContent only. One frame draws the newest value, however many came.
const SVG = "http://www.w3.org/2000/svg";
const ROW = 15;
const CHIP = 13;
const TOP = 20;
const GAP = 26;
const MARKS = { a: "✓", r: "✗", u: "" };
const STATES = { a: "accepted", r: "rejected", u: "unreached" };

const root = element.querySelector(".tree-block") || element;
const figures = make("div", "figures");
const plain = make("p", "plain");
const head = make("div", "step-head");
const back = make("button", "back", "back to the latest step");
const box = make("div", "tree-box");
const svg = draw("svg", { class: "tree", role: "img" });
const timeline = make("div", "timeline");
const caption = make("p", "caption");
const bars = draw("svg", { class: "bars", tabindex: "0", role: "slider" });
const hollow = make("p", "hollow");
back.type = "button";
box.tabIndex = 0;
box.setAttribute("role", "region");
box.setAttribute("aria-label", "Candidate tree of one step, scrollable");
bars.setAttribute("aria-label", "Tokens per step: choose a step with the arrow keys");
caption.textContent = "tokens per step: click a bar, or use ← and →";
hollow.textContent =
  "No step yet. Send a message: the tree of candidate tokens of every step is drawn here.";
box.append(svg);
timeline.append(caption, bars);
root.replaceChildren(figures, plain, head, box, timeline, hollow);

let data = null;
let shape = null; // what the layout was made for
let chips = [];
let pinned = null; // {answer, step}: what the user looks at, while newer steps arrive
let scheduled = false;

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function percent(p) {
  return p === null ? "" : p < 0.01 ? "<1%" : `${Math.round(p * 100)}%`;
}

// ---- layout: once per shape and width ----

function places(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const depth = [];
  const row = [];
  let rows = 0;
  parents.forEach((parent, node) => (depth[node] = parent < 0 ? 0 : depth[parent] + 1));
  const visit = (node) => {
    if (!children[node].length) row[node] = rows++;
    children[node].forEach(visit);
    if (children[node].length) row[node] = row[children[node][0]];
  };
  visit(0);
  return { depth, row, rows, columns: Math.max(...depth) + 1 };
}

function lay(step, drafter, width) {
  const { depth, row, rows, columns } = places(step.parent);
  const pitch = Math.max(108, Math.min(196, (width - 2 + GAP) / columns));
  const chip = pitch - GAP;
  const wide = Math.ceil(pitch * columns - GAP + 2);
  const high = TOP + rows * ROW + 2;
  const top = (node) => TOP + row[node] * ROW;
  svg.replaceChildren();
  svg.setAttribute("width", wide);
  svg.setAttribute("height", high);
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  const word = drafter === "medusa" ? "head" : "depth";
  for (let column = 0; column < columns; column++) {
    const name = column ? `${word} ${column}` : "base LM";
    svg.append(draw("text", { class: "column", x: column * pitch + 1, y: 11 }, name));
  }
  const lines = step.parent.map((parent, node) => {
    if (parent < 0) return null;
    const x = depth[node] * pitch + 1;
    const from = top(parent) + CHIP / 2;
    const to = top(node) + CHIP / 2;
    const bend = GAP * 0.6;
    const path = `M${x - GAP} ${from}C${x - GAP + bend} ${from} ${x - bend} ${to} ${x} ${to}`;
    return svg.appendChild(draw("path", { class: "edge", d: path }));
  });
  chips = step.parent.map((_, node) => {
    const x = depth[node] * pitch + 1;
    const y = top(node);
    const group = draw("g", { class: "chip", "data-node": node });
    const title = draw("title", {});
    const frame = draw("rect", { class: "frame", x, y, width: chip, height: CHIP, rx: 3 });
    const bar = draw("rect", { class: "share", x: x + 1, y: y + CHIP - 1.5, height: 1.5 });
    const text = draw("text", { class: "token", x: x + 4, y: y + 9.5 });
    const mark = draw("text", { class: "mark", x: x + chip - 4, y: y + 9.5 });
    group.append(title, frame, bar, text, mark);
    svg.append(group);
    return { group, title, bar, text, mark, line: lines[node], room: chip - 9 };
  });
}

// ---- one step: texts, states and marks into the places ----

function isWide(character) {
  const code = character.codePointAt(0);
  return code >= 0x1100 && !(code >= 0x2000 && code <= 0x2e7f) && code !== 0x2026;
}

function cut(text, room) {
  let used = 0;
  let kept = "";
  for (const character of text) {
    used += isWide(character) ? 11 : 6.1;
    if (used > room) return `${kept.slice(0, -1)}…`;
    kept += character;
  }
  return kept;
}

function markOf(step, node) {
  const state = step.state[node];
  if (node === 0) return MARKS.a;
  if (state === "u") return step.rank[node] === null ? "" : `#${step.rank[node]}`;
  const margin = step.margin[node];
  if (margin !== null) return `${MARKS[state]}${margin < 0 ? "−" : "+"}${Math.abs(margin).toFixed(1)}`;
  return `${MARKS[state]} ${percent(step.p[node])}`.trim();
}

function own(greedy) {
  return greedy ? "the model's first choice" : "the model's own sample";
}

function titleOf(step, node, greedy) {
  const parent = step.parent[node];
  const lines = [`${step.text[node]}  (token ${step.id[node]}, node ${node})`];
  if (parent < 0) {
    lines.push("the root: already certain before this step");
    return lines.join("\n");
  }
  lines.push(STATES[step.state[node]]);
  if (step.rank[node] !== null) lines.push(`rank #${step.rank[node]} of its head`);
  if (step.q[node] !== null) lines.push(`draft probability ${step.q[node]}`);
  if (step.p[node] !== null) lines.push(`backbone probability ${step.p[node]}`);
  if (step.entropy[parent] !== null) lines.push(`entropy at its parent ${step.entropy[parent]} nats`);
  if (step.threshold[parent] !== null) lines.push(`threshold ${step.threshold[parent]}`);
  if (step.margin[node] !== null) lines.push(`margin log(p / threshold) = ${step.margin[node]}`);
  if (step.same[node] !== null && step.margin[node] === null) {
    lines.push(step.same[node] ? `= ${own(greedy)}` : `not ${own(greedy)}`);
    if (!step.same[node]) lines.push(`which is token ${step.sampled[parent]}`);
  }
  return lines.join("\n");
}

function fill(step, greedy) {
  const room = chips.length ? chips[0].room : 0;
  chips.forEach((chip, node) => {
    const state = step.state[node];
    const mark = markOf(step, node);
    chip.group.setAttribute("data-state", STATES[state]);
    chip.group.setAttribute("class", `chip ${STATES[state]}`);
    if (chip.line) chip.line.setAttribute("class", `edge ${STATES[state]}`);
    chip.title.textContent = titleOf(step, node, greedy);
    chip.text.textContent = cut(step.text[node], room - mark.length * 5.6 - 4);
    chip.mark.textContent = mark;
    const share = step.q[node] === null ? 0 : Math.min(1, step.q[node]);
    chip.bar.setAttribute("width", Math.max(0, share * (room + 7)));
  });
  chips.forEach((chip, node) => step.state[node] === "a" && chip.line && raise(chip.line));
  const path = [...step.state].flatMap((state, node) => (state === "a" ? [step.text[node]] : []));
  svg.setAttribute("data-step", step.index);
  svg.setAttribute(
    "aria-label",
    `Step ${step.index + 1}: ${step.accepted} of ${step.parent.length - 1} draft tokens accepted. ` +
      `Path: ${path.join(" ")}`,
  );
}

function raise(line) {
  svg.insertBefore(line, chips[0].group);
}

// ---- numbers ----

function tile(label, value, title, strong) {
  const node = make("div", strong ? "tile strong" : "tile");
  node.append(make("span", "value", value), make("span", "label", label));
  node.dataset.figure = label;
  if (title) node.title = title;
  return node;
}

function drawFigures(f) {
  const ratio = f.ratio === null ? "–" : `${f.ratio.toFixed(2)}×`;
  const used = f.used === null ? "–" : f.used.toLocaleString("en");
  const context = tile("context", used, "tokens of the context in use");
  const all = f.context ? ` / ${f.context.toLocaleString("en")}` : "";
  context.firstChild.append(make("span", "of", all));
  figures.replaceChildren(
    tile("tokens/s", number(f.rate, 1), "decoding, prefill left out", true),
    tile("vs plain", f.is_plain ? "plain" : ratio, "against plain decoding on this machine", true),
    tile("tokens/step", number(f.per_step, 2), "the paper's acceleration rate"),
    tile("ms/step", number(f.ms, 1), "mean over the steps so far"),
    tile("steps", String(f.steps), "passes of the model after prefill"),
    context,
  );
  plain.textContent = f.is_plain
    ? "This is plain decoding: the baseline the ratio is taken against."
    : f.plain === null
      ? "plain: not measured yet, switch Vanilla on and send"
      : `plain: ${f.plain.toFixed(1)} tokens/s, measured last on this model`;
  plain.classList.toggle("slower", f.ratio !== null && f.ratio < 1 && !f.is_plain);
  if (plain.classList.contains("slower")) plain.textContent += ". Medusa is slower here.";
}

function drawHead(step, f) {
  const parts = [make("b", "", `step ${step.index + 1} / ${f.steps}`)];
  if (step.parent) {
    const text = `accepted ${step.accepted}+1 of ${step.parent.length}`;
    parts.push(make("span", "", text));
    parts[1].title = "draft tokens accepted, and the model's own next token";
    const threshold = step.threshold[0];
    if (threshold !== null) {
      const entropy = number(step.entropy[0], 2);
      const test = make("span", "", `threshold ${threshold} (H ${entropy})`);
      test.title = `at the root: min(ε, δ·exp(−H)) with ε ${data.epsilon}, δ ${data.delta}`;
      parts.push(test);
    }
  } else parts.push(make("span", "", `${step.tokens} tokens; no tree was recorded`));
  const heads = step.heads_ms ? ` (heads ${number(step.heads_ms, 1)})` : "";
  parts.push(make("span", "", `${number(step.ms, 1)} ms${heads}`));
  if (pinned) parts.push(back);
  head.replaceChildren(...parts);
}

function drawBars() {
  const width = Math.max(60, root.clientWidth);
  const pitch = Math.min(14, width / data.bars.length);
  const most = Math.max(...data.bars, 2);
  bars.setAttribute("viewBox", `0 0 ${width} 46`);
  bars.setAttribute("height", 46);
  bars.replaceChildren(
    ...data.bars.map((tokens, place) => {
      const step = data.first + place;
      const high = Math.max(3, (tokens / most) * 42);
      const bar = draw("rect", {
        class: `bar t${Math.min(tokens, 6)}${step === data.step.index ? " now" : ""}`,
        x: place * pitch,
        y: 45 - high,
        width: Math.max(0.8, pitch - (pitch > 3 ? 1.5 : 0.2)),
        height: high,
        "data-step": step,
      });
      bar.append(draw("title", {}, `step ${step + 1}: ${tokens} tokens`));
      return bar;
    }),
  );
  bars.setAttribute("aria-valuemin", data.first + 1);
  bars.setAttribute("aria-valuemax", data.first + data.bars.length);
  bars.setAttribute("aria-valuenow", data.step.index + 1);
}

// ---- values in, frames out ----

function render() {
  scheduled = false;
  const isEmpty = !data || !data.step;
  root.classList.toggle("is-empty", isEmpty);
  if (data) drawFigures(data.figures);
  if (isEmpty) return;
  const step = data.step;
  drawHead(step, data.figures);
  drawBars();
  box.hidden = !step.parent;
  if (!step.parent) return;
  const width = box.clientWidth;
  const wanted = `${data.drafter}|${width}|${step.parent}`;
  if (wanted !== shape) lay(step, data.drafter, width);
  shape = wanted;
  fill(step, data.temperature !== null && data.temperature < 0.001);
  svg.setAttribute("data-answer", data.answer);
}

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(render);
}

function take() {
  const next = props.value ? JSON.parse(props.value) : null;
  if (!next || (pinned && pinned.answer !== next.answer)) pinned = null;
  if (pinned && next.step && next.step.index !== pinned.step && data && data.step)
    next.step = data.step; // newer steps arrive; the user looks at an older one
  data = next;
  schedule();
}

function pick(step) {
  if (!data || !data.bars.length) return;
  if (step === null) pinned = null;
  else {
    const last = data.first + data.bars.length - 1;
    step = Math.max(data.first, Math.min(last, step));
    pinned = { answer: data.answer, step };
  }
  trigger("pick", { step });
}

bars.addEventListener("click", (event) => {
  const step = event.target.dataset && event.target.dataset.step;
  if (step !== undefined) pick(Number(step));
});
bars.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || !data || !data.step) return;
  event.preventDefault();
  pick((pinned ? pinned.step : data.step.index) + by);
});
back.addEventListener("click", () => pick(null));
watch("value", take);
new ResizeObserver(schedule).observe(root);
drawFigures({ rate: null, ratio: null, per_step: null, ms: null, steps: 0, used: null, plain: null });
take();
