// All conversations as one file, and such a file taken in: chosen by a button, or dropped on the list.
// They go past Gradio, which would keep the whole file in the page.
import { blockOf } from "./block.js";
import { ask, view } from "./conversations.js";
import { side } from "./drawer.js";
import { button, make } from "./elements.js";
import { notify, pagePath } from "./page.js";
import { gone } from "./row.js";
import { download } from "./saved.js";

const { given } = blockOf("conversations");
export const foot = make("div", "chat-list-foot");
const chooser = Object.assign(make("input"), { type: "file", accept: ".json", hidden: true });
export const importer = button("", "Import", () => chooser.click());
foot.append(button("", "Save all", saveAll), importer, chooser);
foot.firstChild.title = "Save all conversations as one JSON file";
importer.title = "Add the conversations of such a file, or of an export of ChatGPT or Open WebUI";

// What the server says. Throws an Error that says in words why it does not.
async function askChats(more) {
  const headers = { "x-medusa-tab": view.key };
  const answer = await fetch(`${pagePath()}/chats`, { headers, cache: "no-store", ...more });
  if (!answer.ok) throw Error(await answer.text());
  return answer;
}

async function saveAll() {
  try {
    const file = await (await askChats()).blob();
    download(file, `medusa-chat ${new Date().toLocaleDateString("sv")}.json`); // 2026-11-28
  } catch (error) {
    notify("warning", `The conversations were not saved: ${error.message}`, 10);
  }
}

async function takeFile(file) {
  try {
    const most = given.MAX_FILE / 1024 / 1024;
    if (file.size > given.MAX_FILE) throw Error(`it is larger than ${most} MB`);
    const answer = await askChats({ method: "POST", body: file });
    notify("info", `${file.name}: ${await answer.text()}`, 10);
    gone.clear(); // what was deleted here may be there again
    ask();
  } catch (error) {
    notify("warning", `${file.name} was not imported: ${error.message}`, 10);
  }
}

chooser.addEventListener("change", () => {
  takeFile(chooser.files[0]);
  chooser.value = ""; // the same file may be chosen again
});

function takes(event) {
  const isFile = view.takes && event.dataTransfer.types.includes("Files");
  if (isFile) event.preventDefault();
  side.classList.toggle("takes-files", isFile && event.type === "dragover");
  return isFile;
}

side.addEventListener("dragover", takes);
side.addEventListener("dragleave", ({ relatedTarget }) => {
  if (!side.contains(relatedTarget)) side.classList.remove("takes-files");
});
side.addEventListener("drop", (event) => {
  if (takes(event)) takeFile(event.dataTransfer.files[0]);
});
