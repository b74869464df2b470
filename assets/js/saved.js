// A conversation that is saved as a file: {"at": when, "name": of the file, "text": all of
// it}. The browser puts it where it puts what it downloads.
import { blockOf } from "./block.js";

const { onValue } = blockOf("saved");
let savedAt = 0;

function save(line) {
  if (!line || line.at <= savedAt) return;
  savedAt = line.at;
  const url = URL.createObjectURL(new Blob([line.text], { type: "text/markdown;charset=utf-8" }));
  Object.assign(document.createElement("a"), { href: url, download: line.name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

onValue(save);
