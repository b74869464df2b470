// The temporary chat: its button in the list, and the line over it that says what it is. Gradio's own
// button, which posts the settings, is not shown.
import { button, make, withRole } from "./elements.js";
import { close } from "./drawer.js";

export const opener = button("temporary-open", "Temporary chat", () => {
  document.getElementById("temporary")?.click();
  close();
});
const line = withRole(make("p", "temporary-line"), "status");

export function drawTemporary(isTemporary) {
  const left = document.getElementById("left");
  if (left && !line.isConnected) left.prepend(line);
  line.hidden = !isTemporary;
  line.textContent = isTemporary
    ? "Temporary chat: never stored, gone once you leave it."
    : "";
}

opener.title = "A chat that is never stored, and gone once you leave it";
