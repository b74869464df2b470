// Text that has to fit into a drawing: how wide it is in one font, and as much of it as fits.
const segmenter = "Segmenter" in Intl ? new Intl.Segmenter("en", { granularity: "grapheme" }) : null;
const MOST = 4000; // texts that are remembered

function graphemes(text) {
  return segmenter ? Array.from(segmenter.segment(text), (part) => part.segment) : [...text];
}

// {widthOf, cut, setSize}, each in pixels. font: as in CSS, with its size in px.
export function makePen(font) {
  const pen = document.createElement("canvas").getContext("2d");
  const widths = new Map();
  const cuts = new Map();
  pen.font = font;

  function widthOf(text) {
    let width = widths.get(text);
    if (width === undefined) {
      if (widths.size > MOST) widths.clear();
      width = pen.measureText(text).width;
      widths.set(text, width);
    }
    return width;
  }

  // The text, or as many whole characters of it as fit into `room` pixels, and "…".
  function cut(text, room) {
    if (widthOf(text) <= room) return text;
    const key = `${Math.round(room)}|${text}`;
    if (cuts.has(key)) return cuts.get(key);
    let kept = "";
    for (const part of graphemes(text)) {
      if (widthOf(`${kept}${part}…`) > room) break;
      kept += part;
    }
    if (cuts.size > MOST) cuts.clear();
    cuts.set(key, `${kept}…`);
    return `${kept}…`;
  }

  function setSize(px) {
    pen.font = pen.font.replace(/[\d.]+px/, `${px}px`);
    widths.clear();
    cuts.clear();
  }

  return { widthOf, cut, setSize };
}

// The page's font for tokens.
export function tokenFont(px) {
  const family = getComputedStyle(document.body).getPropertyValue("--font-mono");
  return `${px}px ${family || "monospace"}`;
}
