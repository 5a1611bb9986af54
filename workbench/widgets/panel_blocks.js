// The KV block pool: how full it is, the map, and who holds what.
import { counted, keepChildren, make, percent, rangesText, setAttribute, setProperty, setText } from "./panel_make.js";
import { makeSwatch, showHue } from "./panel_hues.js";
import { BlockMap } from "./panel_block_map.js";

const REST = "Point at a block, or move over the map with the arrow keys.";

export class BlocksPane {
  constructor(part) {
    this.summary = make("span", { className: "wb-summary" });
    this.told = make("span", { className: "wb-told", attributes: { "aria-live": "polite" } });
    this.canvas = make("canvas", { tabIndex: 0, attributes: { role: "application", "aria-label": "Map of the KV blocks" } });
    this.map = new BlockMap(this.canvas, part.look);
    this.legend = make("ul", { className: "wb-holders", attributes: { "aria-label": "Holders of blocks" } });
    this.content = [make("div", { className: "wb-pane-head" }, this.summary, this.told),
      make("div", { className: "wb-scroll wb-map-and-legend" }, make("div", { className: "wb-map" }, this.canvas), this.legend)];
    this.pinned = null;  // request whose blocks stay lit
    this.view = { holders: [], hues: [] };
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
    this.view = view;
    this.holdersOf = holdersByBlock(view.holders);
    const held = view.num_blocks - view.num_free;
    setText(this.summary, `${held.toLocaleString("en")} of ${counted(view.num_blocks, "block")} held, ${view.num_free.toLocaleString("en")} free · ${view.block_size} tokens each`);
    setText(this.told, this.blockText(this.map.chosen));
    keepChildren(this.legend, view.holders, (one) => one.request_id, (one) => this.makeHolder(one.request_id), showHolder);
    this.light(this.pinned);
    this.map.show(view.hues, view.fill);
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
    const { hues, fill, block_size: size } = this.view;
    if (block < 0 || block >= hues.length) return REST;
    if (hues[block] < 0) return `block ${block} · free`;
    const holders = (this.holdersOf.get(block) || []).map(([name, place, count]) => `${name}, its ${place} of ${count}`);
    return `block ${block} · ${holders.join(" and ") || "holder unknown"} · ${Math.round(fill[block] * size)} of ${size} tokens cached (${percent(fill[block])})`;
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

function holdersByBlock(holders) {
  const found = new Map();
  for (const { request_id: name, blocks } of holders) {
    blocks.forEach((block, place) => found.set(block, [...(found.get(block) || []), [name, place + 1, blocks.length]]));
  }
  return found;
}

function showHolder(item, { request_id: name, hue, blocks, tokens }) {
  const [swatch, label, words] = item.firstChild.children;
  showHue(swatch, hue);
  setText(label, name);
  setText(words, `${counted(blocks.length, "block")}, ${counted(tokens, "token")}`);
  setProperty(item.firstChild, "title", `Light its blocks: ${rangesText(blocks)}`);
}
