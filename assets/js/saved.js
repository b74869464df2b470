// A conversation that is saved as a file: {"number": of the save, "name": of the file, "text": all of
// it}. The browser puts it where it puts what it downloads.
function save() {
  const line = props.value ? JSON.parse(props.value) : { number: 0 };
  if (line.number <= (window.medusaSaved || 0)) return; // this block may be made anew
  window.medusaSaved = line.number;
  const url = URL.createObjectURL(new Blob([line.text], { type: "text/markdown;charset=utf-8" }));
  Object.assign(document.createElement("a"), { href: url, download: line.name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

watch("value", save);
save();
