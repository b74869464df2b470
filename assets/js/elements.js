// What the page's own blocks begin with and are made of. A block's value is one JSON text. Text goes
// in by textContent only.
const root = element.firstElementChild;

// Tells `act` what the value says, now and whenever it is another; null while it says nothing.
function onValue(act) {
  const tell = () => act(props.value ? JSON.parse(props.value) : null);
  watch("value", tell);
  tell();
}

// Does something every so many milliseconds, until the block is gone.
function every(ms, act) {
  const clock = setInterval(() => (element.isConnected ? act() : clearInterval(clock)), ms);
}

// What does something in the next frame, once however often it is called until then.
function inNextFrame(act) {
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

// Whether somebody sees the block: its tab of the page is open, and the page's of the browser.
function isInSight() {
  return root.offsetParent !== null && !document.hidden;
}

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

// A list to choose from. choices: [value, text] each; act: told the value that was chosen.
function choiceOf(label, choices, value, act) {
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
function fillIn(box, text) {
  if (box.value === text) return;
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
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
