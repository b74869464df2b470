// The text of an answer as it came against what is drawn of it: which drawn character is which.
const MARKUP = new Set("*_`~#>|[]()!\\-:=+");
const LINK = /!\[[^\]]*\]\([^)]*\)|(?<=\])\((?:[^()\s]|\([^()\s]*\))*(?:\s+"[^"]*")?\)/g;
const NEEDS = [6, 3]; // characters in a row that must agree before anything else is skipped
const AHEAD = 4000;

// The characters that can be drawn, [character, tokens] in two lists; space and line markup out.
function characters(pieces) {
  let text = "";
  const at = [];
  for (let i = 0; i < pieces.length; i += 2) {
    for (let k = 0; k < pieces[i + 1].length; k++) at.push(pieces[i]);
    text += pieces[i + 1];
  }
  const chars = [];
  const tokens = [];
  let start = 0;
  let fence = "";
  for (const line of text.split("\n")) {
    const mark = /^\s*(`{3,}|~{3,})/.exec(line);
    let from = 0;
    if (mark && (!fence || mark[1].startsWith(fence))) {
      fence = fence ? "" : mark[1];
      from = line.length;
    } else if (!fence && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(line) && /-/.test(line)) {
      from = line.length;
    } else if (!fence) {
      from = /^(\s*>)*\s*(#{1,6}\s|[-*+]\s+(\[[ xX]\]\s)?|\d{1,9}[.)]\s)?/.exec(line)[0].length;
    }
    const ends = fence || mark ? [] : [...line.matchAll(LINK)];
    for (let k = from; k < line.length; k++) {
      if (ends.length && k === ends[0].index) k += ends.shift()[0].length;
      if (k >= line.length || /\s/.test(line[k])) continue;
      chars.push(line[k]);
      tokens.push(at[start + k]);
    }
    start += line.length + 1;
  }
  return [chars, tokens];
}

// Whether what is drawn from r on may begin at raw character w; markup in between is no matter.
function fits(shown, r, chars, w, need) {
  let same = 0;
  while (same < need && r < shown.length) {
    if (w >= chars.length) return false;
    if (chars[w] === shown[r]) {
      r++;
      w++;
      same++;
    } else if (same && MARKUP.has(chars[w])) w++;
    else return false;
  }
  return same > 0;
}

// Where in the raw text drawn character r is, from w on: past markup, else where the most of what
// follows agrees; -1 when it is not there.
function place(shown, r, chars, w) {
  let at = w;
  while (at < chars.length && chars[at] !== shown[r] && MARKUP.has(chars[at])) at++;
  if (chars[at] === shown[r]) return at;
  const last = Math.min(chars.length, w + AHEAD);
  for (const need of NEEDS) {
    for (at = w; at < last; at++) if (fits(shown, r, chars, at, need)) return at;
  }
  return -1;
}

// For each drawn character, without space, the tokens of its piece; 0 where it is not in the text.
export function align(nodes, pieces) {
  const shown = nodes.flatMap((node) => node.data.split("").filter((c) => /\S/.test(c)));
  const [chars, tokens] = characters(pieces);
  const found = new Array(shown.length).fill(0);
  let w = 0;
  for (let r = 0; r < shown.length; r++) {
    const at = place(shown, r, chars, w);
    if (at < 0) continue;
    found[r] = tokens[at];
    w = at + 1;
  }
  return found;
}

export function textNodes(target) {
  const nodes = [];
  const walker = document.createTreeWalker(target, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement.closest("button, .katex, .answer-note, [aria-hidden=true]")
      ? NodeFilter.FILTER_REJECT
      : NodeFilter.FILTER_ACCEPT,
  );
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return nodes;
}

export function range(node, from, to) {
  const made = new Range();
  made.setStart(node, from);
  made.setEnd(node, to);
  return made;
}
