// Which part of a text is said, and which is thought aloud.
const OPEN = "<think>";
const CLOSE = "</think>";

// [what is said, what is thought, is it still thinking]
function split(text) {
  let said = "";
  let inner = "";
  let at = 0;
  const close = text.indexOf(CLOSE);
  const first = text.indexOf(OPEN);
  if (close >= 0 && !(first >= 0 && first < close)) {
    inner = text.slice(0, close);
    at = close + CLOSE.length;
  }
  for (;;) {
    const open = text.indexOf(OPEN, at);
    if (open < 0) return [said + text.slice(at), inner, false];
    said += text.slice(at, open);
    const end = text.indexOf(CLOSE, open);
    if (end < 0) return [said, inner + text.slice(open + OPEN.length), true];
    inner += text.slice(open + OPEN.length, end);
    at = end + CLOSE.length;
  }
}
