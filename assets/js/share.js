// The Share button and its dialog. The value is what the owner may see; guests get an empty one.
// The server makes the link; it arrives here with the next status.
import { blockOf } from "./block.js";
import { button, choiceOf, make, withRole } from "./elements.js";
import { counted } from "./format.js";

const { root, trigger, onValue } = blockOf("share");
const opener = button("tool named", "Share", () => {
  drawDialog();
  dialog.showModal();
});
const dialog = make("dialog", "share-dialog");
let view = null;

function row(label, text, name) {
  const line = make("div", "share-row");
  const field = make("input", "");
  const copy = button("tool named", "Copy", async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      document.execCommand("copy"); // a page that is not on https
    }
    copy.textContent = "Copied";
  });
  field.id = `share-${name}`;
  field.readOnly = true;
  field.value = text;
  const word = make("label", "", label);
  word.htmlFor = field.id;
  copy.setAttribute("aria-label", `Copy: ${label}`);
  line.append(word, field, copy);
  return line;
}

function left(expires) {
  const minutes = Math.max(0, Math.round((expires * 1000 - Date.now()) / 60000));
  const day = { weekday: "short", hour: "2-digit", minute: "2-digit" };
  const until = new Date(expires * 1000).toLocaleString([], day);
  const span = minutes < 120 ? `${minutes} minutes` : `${Math.round(minutes / 60)} hours`;
  return `The link ends in ${span}, ${until}.`;
}

function drawOff() {
  const choices = view.hours.map((count) => [count, counted(count, "hour")]);
  const hours = choiceOf("The link ends after", choices, 24, () => {});
  hours.id = "share-hours";
  const label = make("label", "", "The link ends after");
  label.htmlFor = hours.id;
  const begin = button("share-main", "Make a link", () => {
    begin.disabled = true;
    trigger("begin_share", { hours: Number(hours.value) });
  });
  const line = make("div", "share-row");
  line.append(label, hours);
  const message = withRole(make("p", "share-message", view.message), "alert");
  message.hidden = !view.message;
  return [
    make(
      "p",
      "",
      "A public link to this page, through Gradio's tunnel. It always asks for a password; guests " +
        "use this machine's model and see only their own conversation.",
    ),
    message,
    line,
    begin,
  ];
}

function drawMaking() {
  const line = withRole(make("p", "share-making", "Making the link …"), "status");
  return [line, endButton("Cancel")];
}

function drawOn() {
  const image = make("img", "share-qr");
  image.src = view.qr;
  image.alt = "QR code of the link that needs no password";
  const words = make("div", "share-words");
  words.append(
    row("Link", view.url, "url"),
    row("Password", view.password, "password"),
    row("Link with the password in it", view.address, "address"),
  );
  const both = make("div", "share-both");
  both.append(image, words);
  const ends = make("p", "", left(view.expires));
  return [both, ends, endButton("Stop sharing")];
}

function endButton(text) {
  return button("share-end", text, () => trigger("end_share", {}));
}

function drawDialog() {
  const head = make("div", "share-head");
  const title = make("h2", "", "Share this model");
  const close = button("tool", "×", () => dialog.close());
  title.id = "share-title";
  close.setAttribute("aria-label", "Close");
  head.append(title, close);
  const body = { off: drawOff, making: drawMaking, on: drawOn }[view.status]();
  const hadFocus = dialog.contains(document.activeElement);
  dialog.replaceChildren(head, ...body);
  if (hadFocus) (dialog.querySelector(".share-main, .share-end") || close).focus();
}

function draw(line) {
  view = line;
  root.hidden = !view;
  if (!view) {
    dialog.close();
    return;
  }
  const isOn = view.status === "on";
  opener.textContent = isOn ? "Shared" : view.status === "making" ? "Sharing …" : "Share";
  opener.classList.toggle("is-on", isOn);
  drawDialog();
}

dialog.setAttribute("aria-labelledby", "share-title");
opener.setAttribute("aria-haspopup", "dialog");
dialog.addEventListener("keydown", (event) => event.stopPropagation()); // Esc is the dialog's
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
root.replaceChildren(opener, dialog);
onValue(draw);
