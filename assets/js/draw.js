// SVG and its attributes. Model text is written with textContent only.
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
