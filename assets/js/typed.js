// What a user wrote is shown as it was typed: Gradio draws it as Markdown, which is hidden, and the
// text stands beside it. The conversation itself keeps the text, so editing and copying are Gradio's.
let typedRows = [];

function drawTyped() {
  const all = document.querySelectorAll("#history .message-row");
  for (const [row, text] of typedRows) {
    const content = all[row]?.querySelector(".user .message-content");
    if (!content) continue;
    let shown = content.querySelector(":scope > .as-typed");
    if (!shown) {
      shown = make("div", "as-typed");
      shown.dir = "auto";
      content.append(shown);
    }
    say(shown, text);
  }
}

function showTyped(rows) {
  typedRows = rows;
  drawTyped();
}

const conversation = document.getElementById("conversation");
if (conversation) {
  new MutationObserver(drawTyped).observe(conversation, { childList: true, subtree: true });
}
