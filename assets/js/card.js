// The card of one node: what the step recorded at once, both top 10s once the model has answered.
import { bdi, button, hide, make, meterOf, withRole } from "./elements.js";
import { figure, percent, quoted } from "./format.js";
import { panel, root, sends, trigger } from "./panel.js";
import {
  MARKS,
  SOURCES,
  STATES,
  bindWords,
  columnName,
  cumulative,
  depthOf,
  isGreedy,
  isTypical,
  own,
  signed,
  sourceOf,
  stateWords,
} from "./words.js";

export const card = make("section", "card");
card.setAttribute("aria-label", "The chosen node");
card.tabIndex = -1;
hide(card, true);
const ASKING = "Asking the model: what else could have come here? It waits for an answer that runs.";
const UNASKED = "What else could have come here is asked of the model, which is not in this file.";
const peeks = new Map();

function peekKey(of) {
  return `${of.answer}|${of.step}|${of.node}`;
}

export function openCard(data, step, node) {
  panel.asked = { answer: data.answer, step: step.index, node, data, view: step };
  drawCard();
  hide(card, false);
  if (!peeks.has(peekKey(panel.asked))) askModel();
}

function askModel() {
  if (sends("peek")) trigger("peek", { answer: panel.asked.answer, step: panel.asked.step, node: panel.asked.node });
}

function takePeek(found) {
  if (!found || found.step === undefined) return;
  if (!found.wait && !found.error) {
    if (peeks.size > 300) peeks.clear();
    peeks.set(peekKey(found), found);
  }
  if (!panel.asked || peekKey(found) !== peekKey(panel.asked) || card.hidden) return;
  if (found.wait) askModel();
  else drawCard(found.error);
}

export function hideCard() {
  hide(card, true);
  panel.asked = null;
}

function drawCard(error) {
  const { data, view, node } = panel.asked;
  const head = make("header");
  const token = make("h3");
  token.append(bdi(view.text[node], "token"));
  const close = button("close", "×", () => panel.closeCard());
  close.setAttribute("aria-label", "Close the card");
  head.append(token, make("span", "id", `token ${view.id[node]}, node ${node}`), close);
  const state = make("p", `state ${STATES[view.state[node]]}`);
  const mark = node === 0 ? MARKS.a : MARKS[view.state[node]] || "·";
  state.append(make("b", "", `${mark} `), stateWords(data, view, node));
  card.replaceChildren(head, state, factList(data, view, node), topLists(error));
  if (canContinue() && view.state[node] !== "a") state.after(continueButton("Continue from this token instead", view.id[node]));
  card.dataset.node = node;
  card.dataset.step = view.index;
}

// In the page, and in an answer of its own: what another program asked for is not the page's.
function canContinue() {
  return sends("continue_from") && !panel.asked.data.watched;
}

// Goes on from a token in the place of the node, in another version of the answer.
function continueButton(text, token) {
  const { step, node } = panel.asked;
  return button("continue-from", text, () => {
    trigger("continue_from", { step, node, token });
    hideCard();
  });
}

function factList(data, step, node) {
  const list = make("dl");
  const row = (name, value, share) => {
    if (value === null || value === undefined || value === "") return;
    const told = make("dd", "", value);
    if (share !== undefined) told.append(meterOf(share));
    const pair = make("div", name.startsWith("what binds") ? "wide" : "");
    pair.append(make("dt", "", name), told);
    list.append(pair);
  };
  const parent = step.parent[node];
  const depth = depthOf(step, node);
  const name = columnName(data, step, depth);
  const exact = (p) => (p === null ? null : p > 0 && p < 1e-4 ? "under 0.0001" : String(p));
  if (node > 0) {
    const [rank, q, p] = [step.rank, step.q, step.p].map((values) => figure(values, node));
    row("proposed by", SOURCES[sourceOf(step, node)]);
    if (rank !== null) row(`rank in ${name}`, `#${rank}`);
    if (q !== null) row("head probability", exact(q), q);
    if (q !== null && depth > 1) row("head probability along its path", exact(Number(cumulative(step, node).toPrecision(3))));
    if (p !== null) row(`the model's probability${temperatureWords(data)}`, exact(p), p);
    row("entropy at its parent", nats(figure(step.entropy, parent)));
    row("threshold at its parent", exact(figure(step.threshold, parent)));
    const margin = figure(step.margin, node);
    if (margin !== null) row("margin, log(p / threshold)", signed(margin));
    row("what binds there", bindWords(data, step, parent));
    const sampled = figure(step.sampled, parent);
    if (!isTypical(step) && sampled !== null && !figure(step.same, node)) {
      const text = textOf(step, sampled);
      row(own(data), `${text === undefined ? "" : `${quoted(text)} `}token ${sampled}`);
    }
  }
  const isParent = step.parent.includes(node);
  if (isParent || node === 0) {
    row("entropy after it", nats(figure(step.entropy, node)));
    row("threshold for its children", exact(figure(step.threshold, node)));
    row("what binds for its children", bindWords(data, step, node));
  }
  return list;
}

// The text of a token: as it was drafted, as the next step's root, or of the top 10 once it is here.
function textOf(step, token) {
  const drafted = [step, panel.steps.get(step.index + 1)].flatMap((one) =>
    one?.id ? one.id.map((id, node) => [id, one.text[node]]) : [],
  );
  const top = peeks.get(peekKey(panel.asked))?.backbone_top || [];
  return [...drafted, ...top].find(([id]) => id === token)?.[1];
}

function nats(entropy) {
  return entropy === null ? null : `${entropy} nats`;
}

function temperatureWords(data) {
  return isGreedy(data) || data.temperature === null ? "" : `, temperature ${data.temperature}`;
}

function topLists(error) {
  const box = make("div", "tops");
  const found = peeks.get(peekKey(panel.asked));
  if (!found) {
    const text = error || (sends("peek") ? ASKING : UNASKED);
    box.append(withRole(make("p", error ? "asking failed" : "asking", text), "status"));
    return box;
  }
  const { data, view, node } = panel.asked;
  const at = node === 0 ? "before the root" : "at its parent";
  box.append(topList(`The model's top 10 ${at}, temperature ${found.temperature}`, found.backbone_top, found.backbone_own, node));
  if (found.head_top.length)
    box.append(topList(`${columnName(data, view, found.head)}'s own top 10, temperature 1`, found.head_top, found.head_own, node));
  else if (node > 0 && (data.drafter === "prompt-lookup" || sourceOf(view, node) === "t"))
    box.append(make("p", "asking", "This guess came from the text itself: there is no head to ask."));
  return box;
}

// The token that came in the place of a node; null where the answer did not come that far.
function cameAt(view, node) {
  const parent = view.parent[node];
  if (parent < 0) return view.id[0];
  const taken = view.parent.findIndex((above, other) => above === parent && view.state[other] === "a");
  if (taken > 0) return view.id[taken];
  return view.state[parent] === "a" ? figure(view.sampled, parent) : null;
}

// Beside a token of a top 10 that did not come there.
function continueCell(token, text) {
  const { view, node } = panel.asked;
  const cell = make("td", "go");
  if (!canContinue() || token === cameAt(view, node) || token === view.id[node]) return cell;
  const go = continueButton("↳", token);
  go.title = `Continue from ${text} instead`;
  go.setAttribute("aria-label", go.title);
  cell.append(go);
  return cell;
}

function topList(title, rows, own, node) {
  const { view } = panel.asked;
  const parent = view.parent[node];
  const siblings = new Set(view.id.filter((_, other) => other && view.parent[other] === parent));
  const table = make("table");
  table.append(make("caption", "", title));
  const body = table.appendChild(make("tbody"));
  const beyond = own.filter(([id]) => !rows.some((row) => row[0] === id));
  for (const [id, text, p, rank] of [...rows, ...beyond]) {
    const line = make("tr", rank > rows.length ? "beyond" : "");
    if (id === view.id[node]) line.classList.add("this");
    const name = make("th");
    name.scope = "row";
    name.append(bdi(text));
    if (id === view.id[node]) name.append(make("span", "tag", "this node"));
    else if (siblings.has(id)) name.append(make("span", "tag", "in the tree"));
    const share = make("td", "p", percent(p));
    share.title = String(p);
    const bar = make("td", "bar");
    bar.append(meterOf(p));
    line.append(make("td", "rank", `#${rank}`), name, share, bar, continueCell(id, text));
    line.dataset.id = id;
    body.append(line);
  }
  return table;
}

// Of the block "peek", which shows nothing itself: what the model said about one node.
export function begin({ onValue }) {
  onValue((found) => root.isConnected && takePeek(found));
}
