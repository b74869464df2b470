// What the browser keeps as files: what the server writes (a conversation as Markdown, an answer as
// HTML, in the block "saved"), and the drawing of a step as a PNG, an SVG with its styles on a canvas.
const COPIED = [
  ...["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-opacity"],
  ...["opacity", "display", "visibility", "font-family", "font-size", "font-weight", "text-anchor", "letter-spacing"],
];
const MARGIN = 12; // px
const SHARP = 2; // pixels of the picture for one of the page

function withStyles(svg) {
  const copy = svg.cloneNode(true);
  const parts = copy.querySelectorAll("*");
  svg.querySelectorAll("*").forEach((node, place) => {
    const style = getComputedStyle(node);
    parts[place].setAttribute("style", COPIED.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

// A promise of a Blob. background: a colour of CSS.
export async function pngOf(svg, background) {
  const [wide, high] = [svg.width.baseVal.value, svg.height.baseVal.value];
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(withStyles(svg))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = (wide + 2 * MARGIN) * SHARP;
  canvas.height = (high + 2 * MARGIN) * SHARP;
  const pen = canvas.getContext("2d");
  pen.fillStyle = background;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, MARGIN * SHARP, MARGIN * SHARP, wide * SHARP, high * SHARP);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// Has the browser keep a Blob as a file.
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// file: {"at": when, "name", "text": all of it}. It goes where the browser puts what it downloads.
export function begin({ onValue }) {
  let savedAt = 0;
  onValue((file) => {
    if (!file || file.at <= savedAt) return;
    savedAt = file.at;
    const kind = file.name.endsWith(".html") ? "html" : "markdown";
    download(new Blob([file.text], { type: `text/${kind};charset=utf-8` }), file.name);
  });
}
