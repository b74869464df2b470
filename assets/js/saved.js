// A conversation, or an answer with its steps, that is saved as a file: {"at": when, "name": of the
// file, "text": all of it}. The browser puts it where it puts what it downloads.
import { blockOf } from "./block.js";
import { download } from "./picture.js";

const { onValue } = blockOf("saved");
let savedAt = 0;

function save(line) {
  if (!line || line.at <= savedAt) return;
  savedAt = line.at;
  const kind = line.name.endsWith(".html") ? "html" : "markdown";
  download(new Blob([line.text], { type: `text/${kind};charset=utf-8` }), line.name);
}

onValue(save);
