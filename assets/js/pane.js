// The pane of the microscope: beside the chat where there is room, and open at the first visit; else
// a sheet over it, opened by the strip of an answer.
import { button } from "./elements.js";
import { figures } from "./numbers.js";
import { store, stored } from "./page.js";
import { root } from "./panel.js";

const PANE = "medusa-chat-pane";
const BESIDE = matchMedia("(min-width: 1100px)");
const pane = root.closest("#right");
const grid = root.closest("#columns");

function setPane(isOpen) {
  if (isOpen) delete grid.dataset.pane;
  else grid.dataset.pane = "closed";
  if (BESIDE.matches) store("localStorage", PANE, isOpen ? "open" : "closed");
}

function arrangePane() {
  if (BESIDE.matches && stored("localStorage", PANE) !== "closed") delete grid.dataset.pane;
  else grid.dataset.pane = "closed";
}

const shut = button("shut", "×", () => {
  setPane(false);
  document.querySelector("#box textarea")?.focus();
});
shut.setAttribute("aria-label", "Close the microscope");
figures.append(shut);
pane.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || BESIDE.matches || event.defaultPrevented) return;
  event.preventDefault();
  setPane(false);
});
window.addEventListener("medusa-microscope", () => setPane(true));
BESIDE.addEventListener("change", arrangePane);
arrangePane();
