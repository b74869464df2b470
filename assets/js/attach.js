// Text files into the message, picked by a button or dropped on the chat: each with its name and in a
// fence, where the cursor stands. They are read here, in the browser; a PDF alone goes to the program,
// which gives its text and keeps nothing.
import { blockOf } from "./block.js";
import { button, icon, make } from "./elements.js";
import { notify, pagePath } from "./page.js";

const { root, given } = blockOf("attach");
const left = root.closest("#left");
const picker = make("input");
const opener = button("tool", "", () => picker.click());
Object.assign(picker, { type: "file", multiple: true, hidden: true });
opener.append(icon("M12 5v14M5 12h14"));
opener.title = "Add text or PDF files to the message";
opener.setAttribute("aria-label", opener.title);
root.replaceChildren(opener, picker);

async function attach(files) {
  for (const file of files) {
    try {
      const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
      const place = conversationNow();
      const text = isPdf ? await pdfTextOf(file) : await textOf(file);
      if (conversationNow() !== place) throw Error("another conversation is shown now");
      insert(fenced(file.name, text));
    } catch (error) {
      notify("warning", `${file.name} was not added: ${error.message}`, 10);
    }
  }
}

function conversationNow() {
  return document.getElementById("chat-title")?.dataset.id;
}

// Throws an Error that says in words why a file is no text for a message.
async function textOf(file) {
  const most = given.MAX_CHARACTERS.toLocaleString("en");
  if (file.size > given.MAX_CHARACTERS) throw Error(`it is larger than ${most} bytes, the most of a message`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // not UTF-8, or a folder
  }
  throw Error("it is no text in UTF-8");
}

// Throws an Error that says in words why a PDF gives no text.
async function pdfTextOf(file) {
  if (file.size > given.MAX_PDF) throw Error(`it is larger than ${given.MAX_PDF >> 20} MB`);
  const { view } = await import("./conversations.js"); // which its own place begins
  const headers = { "x-medusa-tab": view.key };
  notify("info", `Reading ${file.name} …`, 5);
  const answer = await fetch(`${pagePath()}/attachments`, { method: "POST", headers, body: file });
  if (!answer.ok) throw Error(await answer.text());
  const { text, pages } = await answer.json();
  notify("info", `${file.name}: ${pages} page${pages === 1 ? "" : "s"}, text only`, 8);
  return text;
}

function fenced(name, text) {
  const runs = (text.match(/`{3,}/g) || []).map((run) => run.length);
  const fence = "`".repeat(runs.reduce((most, run) => Math.max(most, run + 1), 3));
  return `${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n`;
}

function insert(block) {
  const box = document.querySelector("#box textarea");
  const { value, selectionStart, selectionEnd } = box;
  const most = given.MAX_CHARACTERS.toLocaleString("en");
  if (value.length + block.length > given.MAX_CHARACTERS) throw Error(`a message has at most ${most} characters`);
  const isInLine = selectionStart > 0 && value[selectionStart - 1] !== "\n";
  box.setRangeText(`${isInLine ? "\n\n" : ""}${block}`, selectionStart, selectionEnd, "end");
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.focus();
}

picker.addEventListener("change", () => {
  attach([...picker.files]);
  picker.value = ""; // the same file may be picked again
});

function carriesFiles({ dataTransfer }) {
  return dataTransfer.types.includes("Files");
}

left.addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  left.classList.add("takes-files");
});
left.addEventListener("dragleave", ({ relatedTarget }) => {
  if (!left.contains(relatedTarget)) left.classList.remove("takes-files");
});
left.addEventListener("drop", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  left.classList.remove("takes-files");
  attach([...event.dataTransfer.files]);
});
