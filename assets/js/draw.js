// What every part of the panel draws with. Model text is written with textContent only.
const SVG = "http://www.w3.org/2000/svg";
const ISOLATE = ["\u2068", "\u2069"]; // a token never turns the line that quotes it around
const segmenter = "Segmenter" in Intl ? new Intl.Segmenter("en", { granularity: "grapheme" }) : null;
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
const cuts = new Map();

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  set(node, attributes);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Writes only what is new: an attribute of SVG that is set again costs its style again.
function set(node, attributes) {
  for (const name in attributes) {
    const value = String(attributes[name]);
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
}

function hide(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

// A share of 1 with as many digits as say something.
function percent(p) {
  if (p === null || p === undefined) return "–";
  if (p > 0 && p < 0.001) return "<0.1%";
  return `${(p * 100).toFixed(p < 0.0995 ? 1 : 0)}%`;
}

function figure(list, node) {
  return list ? list[node] : null;
}

function quoted(text) {
  return ISOLATE[0] + text + ISOLATE[1];
}

// ---- text that has to fit ----

function graphemes(text) {
  return segmenter ? Array.from(segmenter.segment(text), (part) => part.segment) : [...text];
}

function widthOf(text) {
  let width = widths.get(text);
  if (width === undefined) {
    if (widths.size > 4000) widths.clear();
    width = pen.measureText(text).width;
    widths.set(text, width);
  }
  return width;
}

// The text, or as many whole characters of it as fit into `room` pixels, and "…".
function cut(text, room) {
  if (widthOf(text) <= room) return text;
  const key = `${Math.round(room)}|${text}`;
  if (cuts.has(key)) return cuts.get(key);
  let kept = "";
  for (const part of graphemes(text)) {
    if (widthOf(`${kept}${part}…`) > room) break;
    kept += part;
  }
  if (cuts.size > 4000) cuts.clear();
  cuts.set(key, `${kept}…`);
  return `${kept}…`;
}
