// What the page's own blocks are made of. Text goes in by textContent only.
function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  if (tag === "button") node.type = "button";
  return node;
}

// Writes only what is new: a text that stays costs no layout.
function say(node, text) {
  if (node.textContent === text) return;
  const only = node.firstChild;
  if (only && only.nodeType === Node.TEXT_NODE && !only.nextSibling) only.data = text;
  else node.textContent = text;
}

function button(name, text, act) {
  const node = make("button", name, text);
  node.addEventListener("click", act);
  return node;
}

// A drawing of one line on 24 by 24.
function icon(line) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", line);
  svg.append(path);
  return svg;
}

// What a node is to a screen reader, and how it is called there.
function withRole(node, role, label) {
  node.setAttribute("role", role);
  if (label) node.setAttribute("aria-label", label);
  return node;
}

// A box whose content scrolls: the keyboard reaches it.
function scrollRegion(name, label) {
  const node = withRole(make("div", name), "region", label);
  node.tabIndex = 0;
  return node;
}

function counted(count, what) {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

function number(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}
