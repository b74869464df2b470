// What our own blocks are made of. Text goes in by textContent only.
// What does something in the next frame, once however often it is called until then.
export function inNextFrame(act) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      act();
    });
  };
}

export function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  if (tag === "button") node.type = "button";
  return node;
}

// Writes only what is new: a text that stays costs no layout.
export function say(node, text) {
  if (node.textContent === text) return;
  const only = node.firstChild;
  if (only && only.nodeType === Node.TEXT_NODE && !only.nextSibling) only.data = text;
  else node.textContent = text;
}

export function button(name, text, act) {
  const node = make("button", name, text);
  node.addEventListener("click", act);
  return node;
}

// A list to choose from. choices: [value, text] each; act: told the value that was chosen.
export function choiceOf(label, choices, value, act) {
  const node = make("select", "choice");
  node.setAttribute("aria-label", label);
  for (const [key, text] of choices) {
    const option = make("option", "", text);
    option.value = key;
    node.append(option);
  }
  node.value = value;
  node.addEventListener("change", () => act(node.value));
  return node;
}

// Puts a text into a box of Gradio's, which hears of it as if it was typed.
export function fillIn(box, text) {
  if (box.value === text) return;
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

// A drawing of one line on 24 by 24.
export function icon(line) {
  const svg = draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" });
  svg.append(draw("path", { d: line }));
  return svg;
}

// What a node is to a screen reader, and how it is called there.
export function withRole(node, role, label) {
  node.setAttribute("role", role);
  if (label) node.setAttribute("aria-label", label);
  return node;
}

// A box whose content scrolls: the keyboard reaches it.
export function scrollRegion(name, label) {
  const node = withRole(make("div", name), "region", label);
  node.tabIndex = 0;
  return node;
}

export function bdi(text, name) {
  const node = make("bdi", name, text);
  node.dir = "auto";
  return node;
}

export function meterOf(share) {
  const meter = make("span", "share");
  const fill = meter.appendChild(make("i"));
  fill.style.width = `${Math.max(0, Math.min(100, share * 100))}%`;
  return meter;
}

// SVG and its attributes.
const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  set(node, attributes);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Writes only what is new: an attribute of SVG that is set again costs its style again.
export function set(node, attributes) {
  for (const name in attributes) {
    const value = String(attributes[name]);
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
}

export function hide(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

// Acts when something in a block of the conversation was drawn, by whomever. Each asks for its own
// block: the answer that comes is drawn 25 times a second, and a long history is dear to look at.
export function whenDrawn(id, act) {
  new MutationObserver((seen) => {
    const block = document.getElementById(id);
    if (seen.some(({ target }) => block?.contains(target) || target.contains(block))) act();
  }).observe(document.getElementById("conversation"), {
    childList: true,
    subtree: true,
    characterData: true,
  });
}
