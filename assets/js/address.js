// The address and the title of the browser's tab name the conversation that is shown: it can be kept
// as a bookmark, opened in another tab, and gone back to.
import { blockOf } from "./block.js";
import { view } from "./conversations.js";
import { answered } from "./page.js";

const { trigger } = blockOf("conversations");
const PAGE = "medusa-chat";

function readAddress() {
  return location.hash.slice(1);
}

let going = ""; // the address that the browser went to, until it is shown

// isFirst: the page was opened, which is no step to go back to.
export function writeAddress(isFirst) {
  document.title = view.title ? `${view.title} · ${PAGE}` : PAGE;
  if (going && going !== view.current) return; // a view from before
  going = "";
  if (view.current === readAddress()) return;
  history[isFirst ? "replaceState" : "pushState"](history.state, "", `#${view.current}`);
}

window.addEventListener("popstate", () => {
  const id = readAddress();
  if (!id) return;
  going = id;
  trigger("open_conversation", { id });
  stay(id);
});

// A conversation that is not there: the address is that of what is shown.
async function stay(id) {
  const pause = () => new Promise((done) => setTimeout(done, 1500));
  await pause();
  await answered(); // over a slow link it may come late
  await pause();
  if (going === id) { going = ""; writeAddress(true); }
}

// A place within an answer is no address of the page.
document.addEventListener("click", (event) => {
  if (event.target.closest?.(':is(#history, #live-text) a[href^="#"]')) event.preventDefault();
}, true);
