// Recurrent states: a square a slot in its request's hue, and a chip a snapshot with the block it stands behind.
import { counted, fillChildren, keepChildren, make, setAttribute, setProperty, setText } from "./panel_make.js";
import { makeSwatch, showHue } from "./panel_hues.js";

export class StatesList {
  // `choose` a block of the map; -1: none.
  constructor(choose) {
    this.choose = choose;
    this.text = make("span", { className: "wb-soft" });
    this.slots = make("ul", { className: "wb-slots", attributes: { "aria-label": "Live slots of recurrent states" } });
    this.keptText = make("span", { className: "wb-soft" });
    this.kept = make("ul", { className: "wb-snapshots", attributes: { "aria-label": "Snapshots, the least recently used first" } });
    this.keptBox = make("div", {}, makeHead("Snapshots of prefixes", this.keptText), this.kept);
    this.node = make("div", { className: "wb-states", hidden: true }, makeHead("Recurrent states", this.text), this.slots, this.keptBox);
  }

  show(states) {
    setProperty(this.node, "hidden", !states);
    if (!states) return;
    setText(this.text, states.text);
    fillChildren(this.slots, states.slots, () => make("li", {}, makeSwatch()), showSlot);
    setProperty(this.keptBox, "hidden", !states.snapshots);
    setText(this.keptText, states.snapshots_text);
    keepChildren(this.kept, states.snapshots || [], (one) => one.slot, () => this.makeSnapshot(), showSnapshot);
  }

  makeSnapshot() {
    const button = make("button", { type: "button" }, makeSwatch(), make("b"), make("span"));
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => this.choose(Number(button.dataset.block)));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => this.choose(-1));
    return make("li", {}, button);
  }
}

function makeHead(textContent, words) { return make("div", { className: "wb-states-head" }, make("b", { textContent }), words); }

function showSlot(item, { request_id: name, hue }, at) {
  showHue(item.firstChild, hue);
  setAttribute(item, "data-free", hue < 0 ? "true" : null);
  setProperty(item, "title", name ? `slot ${at}: the state of ${name}` : `slot ${at}: free`);
}

function showSnapshot(item, { slot, block, num_tokens: count, hue, text }) {
  const button = item.firstChild, [swatch, label, words] = button.children;
  showHue(swatch, hue);
  setText(label, block === null ? "no block" : `block ${block}`);
  setText(words, count === null ? "" : counted(count, "token"));
  setProperty(button, "title", `Slot ${slot}: the state behind ${text}`);
  setAttribute(button, "data-hue", String(hue));
  setAttribute(button, "data-block", block === null ? "-1" : String(block));
}
