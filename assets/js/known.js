// What the program tells its scripts from the start, by name: JSON in the page (ui/page/shell.py).
const place = globalThis.document?.getElementById("known");

export const known = JSON.parse(place?.textContent ?? "{}");
