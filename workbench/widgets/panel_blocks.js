// The KV block pool: how full it is, what can be reused, the map, and who holds what.
import { counted, fillChildren, keepChildren, make, percent, rangesText, setAttribute, setProperty, setText, unpacked } from "./panel_make.js";
import { makeSwatch, showHue } from "./panel_hues.js";
import { StatesList } from "./panel_states.js";
import { BlockMap, CACHED, FREE } from "./panel_block_map.js";

const REST = "Point at a block, or move over the map with the arrow keys.";

export class BlocksPane {
  constructor(part) {
    this.summary = make("span", { className: "wb-summary" });
    this.keys = make("ul", { className: "wb-keys", attributes: { "aria-label": "Blocks by kind" } });
    this.facts = make("dl", { className: "wb-facts-row" });
    this.told = make("span", { className: "wb-told", attributes: { "aria-live": "polite" } });
    this.canvas = make("canvas", { tabIndex: 0, attributes: { role: "application", "aria-label": "Map of the KV blocks" } });
    this.map = new BlockMap(this.canvas, part.look);
    this.states = new StatesList((block) => this.choose(block));
    this.legend = make("ul", { className: "wb-holders", attributes: { "aria-label": "Holders of blocks" } });
    this.content = [make("div", { className: "wb-pane-head wb-blocks-head" }, this.summary, this.keys, this.facts), this.told,
      make("div", { className: "wb-scroll wb-map-and-legend" }, make("div", {}, make("div", { className: "wb-map" }, this.canvas), this.states.node), this.legend)];
    this.pinned = null;  // request whose blocks stay lit
    this.view = { holders: [] };
    this.kinds = this.refs = this.named = this.tokens = null;  // of each block
    this.listen(part);
  }

  isEmpty({ num_blocks: count }) { return count === 0; }

  listen(part) {
    const { canvas, map } = this;
    canvas.addEventListener("pointermove", (event) => this.choose(map.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.choose(-1));
    canvas.addEventListener("blur", () => this.choose(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    part.repainted.push(() => map.redraw());
    const sizes = new ResizeObserver(() => map.redraw());
    sizes.observe(canvas.parentElement);
    part.signal.addEventListener("abort", () => { sizes.disconnect(); map.stop(); });
  }

  show(view) {
    const holders = view.holders.map((one) => ({ ...one, blocks: wholeNumbers(one.blocks) }));
    this.view = { ...view, holders };
    this.kinds = unpacked(view.kinds);
    this.refs = view.refs ? unpacked(view.refs) : null;
    this.named = view.named ? unpacked(view.named) : null;
    this.tokens = tokensOf(view, this.kinds);
    setText(this.summary, `${counted(view.num_blocks, "block")} of ${view.block_size} tokens`);
    fillChildren(this.keys, keysOf(view), makeKey, showKey);
    fillChildren(this.facts, view.facts, () => make("div", {}, make("dt"), make("dd")), (item, [name, value]) => {
      setText(item.firstChild, name);
      setText(item.lastChild, value);
    });
    setProperty(this.facts, "hidden", view.facts.length === 0);
    setText(this.told, this.blockText(this.map.chosen));
    keepChildren(this.legend, holders, (one) => one.request_id, (one) => this.makeHolder(one.request_id), showHolder);
    this.states.show(view.states);
    this.light(this.pinned);
    this.map.show(this.kinds, this.refs, this.tokens.map((count) => count / view.block_size));
  }

  makeHolder(requestId) {
    const button = make("button", { type: "button", title: "Light its blocks", attributes: { "aria-pressed": "false" } }, makeSwatch(), make("b"), make("span"));
    button.addEventListener("click", () => {
      this.pinned = this.pinned === requestId ? null : requestId;
      this.light(this.pinned);
      for (const one of this.legend.querySelectorAll("button")) setAttribute(one, "aria-pressed", String(one === button && this.pinned !== null));
    });
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => this.light(requestId));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => this.light(this.pinned));
    return make("li", {}, button);
  }

  // Dim all blocks but those of a request; null: none.
  light(requestId) {
    const holder = this.view.holders.find((one) => one.request_id === requestId);
    this.map.lit = holder ? new Set(holder.blocks) : null;
    this.map.redraw();
  }

  choose(block) {
    if (this.map.chosen === block) return;
    this.map.chosen = block;
    setText(this.told, this.blockText(block));
    this.map.redraw();
  }

  blockText(block) {
    const { block_size: size, holders } = this.view;
    if (block < 0 || !this.kinds || block >= this.kinds.length) return REST;
    if (this.kinds[block] === FREE) return `block ${block} · free`;
    if (this.kinds[block] === CACHED) return `block ${block} · cached, held by nobody: a prompt that begins alike skips it`;
    const told = holders.map((one) => [one, one.blocks.indexOf(block)]).filter(([, place]) => place >= 0)
      .map(([{ request_id: name, blocks }, place]) => `${name}, its ${place + 1} of ${blocks.length}`);
    const count = this.refs ? this.refs[block] : 1, held = count > 1 ? `held by ${count}: ` : "";
    const tokens = this.tokens[block], isNamed = this.named && (this.named[block >> 3] >> (block & 7)) & 1;
    return `block ${block} · ${held}${told.join(" and ") || "holder unknown"} · ${tokens} of ${size} tokens cached (${percent(tokens / size)})${isNamed ? " · named" : ""}`;
  }

  key(event) {
    const { map } = this, steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map.columns, ArrowDown: map.columns };
    const step = steps[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = map.chosen < 0 ? 0 : map.chosen + step;
    if (next >= 0 && next < map.numBlocks) this.choose(next);
  }
}

function wholeNumbers(packed) { return new Uint32Array(unpacked(packed).buffer); }

// Cached tokens of each block: all but a few are full or empty.
function tokensOf({ block_size: size, partly }, kinds) {
  const tokens = Float32Array.from(kinds, (kind) => (kind < CACHED ? size : 0));
  for (let at = 0; at < partly.length; at += 2) tokens[partly[at]] = partly[at + 1];
  return tokens;
}

// How many blocks there are of each kind, and what it looks like in the map.
function keysOf({ num_blocks: all, num_free: free, num_shared: shared, num_cached: cached }) {
  const one = ["one", all - free - shared - (cached || 0), "held by one", "The letter and the hue are its request's"];
  const none = ["free", free, "free", "Held by nobody, and holding nothing of use"];
  if (cached === null) return [one, none];
  return [one, ["shared", shared, "shared", "Held by several requests that begin alike; the number says by how many, the hue is the first one's"],
    ["cached", cached, "cached", "Held by nobody; a prompt that begins alike skips it, and it gives way when blocks are needed"], none];
}

function makeKey() { return make("li", {}, make("i", { attributes: { "aria-hidden": "true" } }), make("b"), make("span")); }

function showKey(item, [kind, count, words, title]) {
  setAttribute(item, "data-kind", kind);
  setProperty(item, "title", title);
  setText(item.children[0], { one: "A", shared: "2" }[kind] || "");
  setText(item.children[1], count.toLocaleString("en"));
  setText(item.children[2], words);
}

function showHolder(item, { request_id: name, hue, blocks, tokens }) {
  const [swatch, label, words] = item.firstChild.children;
  showHue(swatch, hue);
  setText(label, name);
  setText(words, `${counted(blocks.length, "block")}, ${counted(tokens, "token")}`);
  setProperty(item.firstChild, "title", `Light its blocks: ${rangesText(blocks)}`);
}
