// The line at the top: model facts as chips, or one sentence. Text goes in by textContent only.
const root = element.querySelector(".status-block") || element;
let seen = null;

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function draw() {
  const value = props.value || "";
  if (value === seen) return;
  seen = value;
  if (!value) return;
  const line = JSON.parse(value);
  const wasOpen = Boolean(root.querySelector("details[open]"));
  const bar = make("div", "status-line");
  bar.dataset.status = line.status;
  bar.setAttribute("role", "status");
  bar.append(make("span", "brand", "medusa-chat"), make("span", "dot"));
  if (line.text) bar.append(make("span", "sentence", line.text));
  for (const [label, text, title] of line.facts) {
    const fact = make("span", "fact");
    fact.append(make("span", "label", label), make("span", "what", text));
    if (title) fact.title = title;
    bar.append(fact);
  }
  if (line.notes.length) {
    const notes = make("details", "notes");
    notes.open = wasOpen;
    notes.append(make("summary", "", "why"));
    const list = make("ul", "");
    for (const note of line.notes) list.append(make("li", "", note));
    notes.append(list);
    bar.append(notes);
  }
  root.replaceChildren(bar);
}

watch("value", draw);
draw();
