// The places that Gradio gives to our own scripts (gr.HTML): each has an element to draw into, a value
// that the server sets, one JSON text, and events that go to the server. The page imports this
// module alone (ui/page/shell.py); it imports the block's own once its place is there.
const blocks = new Map();

// What was drawn of a block, though Gradio may make its place anew: it moves there.
export function blockOf(name) {
  if (!blocks.has(name)) blocks.set(name, makeBlock(name));
  return blocks.get(name);
}

// place: {element, props, watch, trigger} of Gradio. id: of the block, where its script draws several.
// given: what that knows from the start, by name. events: that it sends.
export async function begin(name, id, place, given, events) {
  const block = blockOf(id);
  block.put(place, given, events);
  const script = await import(`./${name}.js`);
  if (!block.isBegun) script.begin?.(block); // Gradio may make the place anew
  block.isBegun = true;
  block.hasBegun();
}

function makeBlock(name) {
  const root = document.createElement("div");
  const watchers = [];
  let place = null;
  let known = []; // events
  let hasBegun;
  const begun = new Promise((done) => (hasBegun = done)); // its script listens
  root.className = `${name}-block`;

  const value = () => place?.props.value || "";
  const tellAll = () => watchers.forEach((act) => act());
  const block = {
    root,
    given: {},
    isBegun: false,
    begun,
    hasBegun,
    put(made, given, events) {
      place = made;
      known = events;
      block.given = given;
      place.element.replaceChildren(root);
      place.watch("value", tellAll);
      tellAll();
    },
    trigger(event, detail) {
      if (!known.includes(event)) throw Error(`the block ${name} sends no event "${event}"`);
      place.trigger(event, detail);
    },
    sends: (event) => known.includes(event),
    value,
    setValue: (text) => (place.props.value = text),
    watch: (act) => watchers.push(act), // called when the value is another
    // Tells `act` what the value says, now and whenever it is another; null while it says nothing.
    onValue(act) {
      const tell = () => act(value() ? JSON.parse(value()) : null);
      watchers.push(tell);
      if (place) tell();
    },
    // Does something every so many milliseconds, while the block is there.
    every: (ms, act) => setInterval(() => root.isConnected && act(), ms),
    // Whether somebody sees the block: its tab of the page is open, and the page's of the browser.
    isInSight: () => root.offsetParent !== null && !document.hidden,
  };
  return block;
}
