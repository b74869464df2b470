// Hands what the model said about one node to the panel, which draws it. Shows nothing itself.
import { blockOf } from "./block.js";

const { onValue } = blockOf("peek");
onValue((detail) => document.dispatchEvent(new CustomEvent("medusa-peek", { detail })));
