// The answer while it is written. The value is JSON lines that only grow: a string is more text,
// {"status": s} what happens before there is text, {"error": s} why nothing comes.
const root = element.querySelector(".live-block") || element;
const bubble = document.createElement("div");
const status = document.createElement("div");
const error = document.createElement("div");
bubble.className = "live-text";
status.className = "live-status";
error.className = "live-error";
status.setAttribute("role", "status");
error.setAttribute("role", "alert");
root.replaceChildren(bubble, status, error);

let read = "";
let scheduled = false;

function scrollBox() {
  return element.closest("#talk");
}

function isAtEnd(box) {
  return box.scrollHeight - box.scrollTop - box.clientHeight < 90;
}

function reset() {
  read = "";
  bubble.textContent = "";
  status.textContent = "";
  error.textContent = "";
}

function fold() {
  scheduled = false;
  const value = props.value || "";
  if (!value.startsWith(read)) reset();
  const box = scrollBox();
  const follow = box && isAtEnd(box);
  let text = "";
  const end = value.lastIndexOf("\n") + 1;
  for (const line of value.slice(read.length, end).split("\n")) {
    if (!line) continue;
    const item = JSON.parse(line);
    if (typeof item === "string") text += item;
    else if ("status" in item) status.textContent = item.status;
    else if ("error" in item) error.textContent = item.error;
  }
  read = value.slice(0, end);
  if (text) bubble.append(document.createTextNode(text));
  root.dataset.busy = String(Boolean(read) && !error.textContent);
  if (follow || error.textContent) box.scrollTop = box.scrollHeight;
}

watch("value", () => {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(fold);
});
fold();

// A new turn in the conversation is shown from its end.
const talk = scrollBox();
if (talk) {
  let height = 0;
  new ResizeObserver(() => {
    const history = talk.querySelector("#history");
    const now = history ? history.offsetHeight : 0;
    if (now > height) talk.scrollTop = talk.scrollHeight;
    height = now;
  }).observe(talk.querySelector("#history") || talk);
}
