// The two columns of a race. Text is written with appendData only, so that a frame costs what is new
// and not what is there.
import { race, result } from "./compare.js";
import { make, say, scrollRegion } from "./elements.js";
import { counted, duration, number } from "./format.js";
import { isGpuClock } from "./race.js";
import { at } from "./replay.js";

const CHUNK = 2000; // characters after which a new line begins a new block
export const track = make("div", "lanes");

export let lanes = [];

export function makeLane(name, key) {
  const box = make("section", "lane");
  const head = make("div", "lane-head");
  const lane = { box, frames: [], part: [Infinity, Infinity] };
  lane.flag = make("span", "flag");
  lane.count = make("span", "lane-count");
  lane.bar = make("progress", "lane-bar");
  lane.text = scrollRegion("lane-text", `${name}: text`);
  lane.bar.max = 1;
  lane.bar.value = 0;
  lane.bar.setAttribute("aria-label", `${name}: progress`);
  box.dataset.side = key;
  head.append(make("h3", "", name), lane.flag, lane.count);
  box.append(head, lane.bar, lane.text);
  return lane;
}

export function setLanes(made) {
  lanes = made;
  track.replaceChildren(...lanes.map((lane) => lane.box));
}

// A lane's recording, with the tokens and the time of every frame summed up.
export function record(side) {
  const lane = makeLane(side.name, side.key);
  let tokens = 0;
  lane.side = side;
  lane.frames = side.frames;
  lane.tokens = side.frames.map((frame) => (tokens += frame[2]));
  empty(lane);
  return lane;
}

function empty(lane) {
  lane.text.replaceChildren();
  lane.done = 0; // frames that are shown
  lane.shown = 0; // characters
  lane.tail = null; // the text node that grows
  lane.chunk = null;
  lane.room = 0;
}

// Where the texts part, as [from, to] of the token in each: what is marked.
export function markParting() {
  if (!result.difference) return;
  const texts = lanes.map((lane) => lane.frames.map((frame) => frame[1]).join(""));
  const [one, two] = texts;
  let same = 0;
  while (same < one.length && one[same] === two[same]) same++;
  lanes.forEach((lane, which) => {
    const token = result.difference.raw[which];
    let from = same;
    while (from > 0 && same - from < token.length && !texts[which].startsWith(token, from)) from--;
    const isThere = texts[which].startsWith(token, from) && from + token.length > same;
    lane.part = isThere ? [from, from + token.length] : [same, same + 1];
  });
}

function put(lane, piece, isMarked) {
  const line = piece.indexOf("\n", Math.max(0, lane.room)) + 1;
  if (line && line < piece.length) {
    put(lane, piece.slice(0, line), isMarked);
    put(lane, piece.slice(line), isMarked);
    return;
  }
  if (!lane.chunk || (lane.room < 0 && lane.endsLine)) {
    lane.chunk = lane.text.appendChild(make("div", "lane-chunk"));
    lane.room = CHUNK;
    lane.tail = null;
  }
  if (!lane.tail || lane.isMarked !== isMarked) {
    lane.tail = document.createTextNode("");
    lane.isMarked = isMarked;
    const home = isMarked ? lane.chunk.appendChild(make("mark", "differs")) : lane.chunk;
    home.append(lane.tail);
  }
  lane.tail.appendData(piece);
  lane.room -= piece.length;
  lane.endsLine = piece.endsWith("\n");
}

function write(lane, text) {
  const [from, to] = lane.part;
  while (text) {
    const isMarked = lane.shown >= from && lane.shown < to;
    const edge = lane.shown < from ? from : isMarked ? to : Infinity;
    const piece = text.slice(0, edge - lane.shown);
    put(lane, piece, isMarked);
    lane.shown += piece.length;
    text = text.slice(piece.length);
  }
}

export function show(lane) {
  const { frames, side } = lane;
  if (lane.done && frames[lane.done - 1][0] > at) empty(lane);
  let text = "";
  const first = lane.done;
  while (lane.done < frames.length && frames[lane.done][0] <= at) text += frames[lane.done++][1];
  const box = lane.text;
  const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  write(lane, text);
  if (follow && lane.done > first) box.scrollTop = box.scrollHeight;
  const isOver = at >= side.total_ms;
  const tokens = lane.done ? lane.tokens[lane.done - 1] : 0;
  const decoded = at - side.first_ms;
  const rate = isOver ? side.rate : decoded > 0 ? ((tokens - 1) / decoded) * 1000 : null;
  const kind = isGpuClock() ? ", modelled" : "";
  say(lane.count, `${counted(tokens, "token")} · ${number(rate, rate < 10 ? 1 : 0)} tokens/s${kind}`);
  say(lane.flag, isOver ? flagOf(side) : "");
  lane.bar.value = side.tokens ? tokens / side.tokens : 1;
  lane.box.classList.toggle("is-over", isOver);
}

function flagOf(side) {
  const other = race.sides.find((one) => one !== side);
  if (side.total_ms >= other.total_ms) return "finished";
  if (!race.is_race) return "⚑ finished first";
  return `⚑ finished first: ${duration(side.total_ms)} against ${duration(other.total_ms)}`;
}
