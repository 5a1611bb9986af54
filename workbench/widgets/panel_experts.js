// Tokens sent to each expert: a row a layer, a square an expert, the darker the more of its layer's tokens it has.
import { make, percent, setText, unpacked } from "./panel_make.js";

const WIDEST = 26, NARROWEST = 3, GUTTER = 62, SIDE = 104, CROSSED = 8;  // px
const POINT_AT_ONE = "Point at an expert, or move over the map with the arrow keys.";

export class ExpertsPane {
  constructor(part) {
    this.look = part.look;
    this.summary = make("span", { className: "wb-summary" });
    this.told = make("span", { className: "wb-told", attributes: { "aria-live": "polite" } });
    this.scale = make("span", { className: "wb-heat-scale" }, "0", make("i", { attributes: { "aria-hidden": "true" } }), make("span"), "× the layer's mean", make("i", { className: "wb-heat-none", textContent: "×", attributes: { "aria-hidden": "true" } }), "no token");
    this.canvas = make("canvas", { tabIndex: 0, attributes: { role: "application", "aria-label": "Tokens by layer and expert" } });
    this.content = [make("div", { className: "wb-pane-head" }, this.summary, this.scale), this.told,
      make("div", { className: "wb-scroll" }, make("div", { className: "wb-heat-map" }, this.canvas))];
    this.view = { layers: [], num_experts: 0, imbalances: [] };
    this.counts = new BigUint64Array(0);
    this.chosen = -1;
    this.frame = 0;
    this.listen(part);
  }

  isEmpty({ counts }) { return counts === ""; }

  listen(part) {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => this.choose(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    part.repainted.push(() => this.redraw());
    const sizes = new ResizeObserver(() => this.redraw());
    sizes.observe(canvas.parentElement);
    part.signal.addEventListener("abort", () => { sizes.disconnect(); cancelAnimationFrame(this.frame); });
  }

  show(view) {
    this.view = view;
    this.counts = new BigUint64Array(unpacked(view.counts).buffer);
    setText(this.summary, view.summary);
    this.most = Math.max(1, ...view.imbalances);
    setText(this.scale.children[1], this.most.toFixed(2));
    setText(this.told, this.textOf(this.chosen));
    this.redraw();
  }

  redraw() { if (!this.frame) this.frame = requestAnimationFrame(() => this.paint()); }

  // Of one expert: tokens, and how many times its layer's mean.
  loadOf(place) {
    const { num_experts: count } = this.view, first = place - place % count;
    const sum = this.counts.slice(first, first + count).reduce((total, one) => total + one, 0n);
    const tokens = Number(this.counts[place]);
    return { tokens, share: sum ? tokens * count / Number(sum) : 0 };
  }

  paint() {
    this.frame = 0;
    const { canvas, view: { layers, num_experts: count, imbalances }, look } = this, box = canvas.parentElement;
    if (!box || !box.clientWidth || !count) return;
    this.size = Math.max(NARROWEST, Math.min(WIDEST, Math.floor((box.clientWidth - GUTTER - SIDE) / count)));
    const wide = GUTTER + count * this.size + SIDE, tall = layers.length * this.size, scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(tall * scale);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${tall}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "11px system-ui, \"DejaVu Sans\", sans-serif";
    pen.textBaseline = "middle";
    const low = look.resolved("lane"), high = look.resolved("accent"), every = Math.max(1, Math.ceil(13 / this.size));
    layers.forEach((layer, row) => {
      const y = row * this.size;
      for (let expert = 0; expert < count; expert++) this.paintExpert(pen, row * count + expert, GUTTER + expert * this.size, y, low, high);
      if (row % every) return;
      pen.fillStyle = look.resolved("text");
      pen.textAlign = "right";
      pen.fillText(`layer ${layer}`, GUTTER - 8, y + this.size / 2);
      pen.textAlign = "left";
      pen.fillText(`imbalance ${imbalances[row].toFixed(2)}`, GUTTER + count * this.size + 8, y + this.size / 2);
    });
    this.paintChosen(pen);
  }

  paintExpert(pen, place, x, y, low, high) {
    const side = this.size - (this.size > 5 ? 1 : 0), { tokens, share } = this.loadOf(place);
    pen.globalAlpha = 1;
    pen.fillStyle = low;
    pen.fillRect(x, y, side, side);
    if (tokens) {
      pen.globalAlpha = Math.max(0.06, share / this.most);
      pen.fillStyle = high;
      pen.fillRect(x, y, side, side);
      pen.globalAlpha = 1;
    } else if (side >= CROSSED) {
      pen.fillStyle = this.look.resolved("soft");
      pen.textAlign = "center";
      pen.fillText("×", x + side / 2, y + side / 2);
    }
  }

  paintChosen(pen) {
    if (this.chosen < 0) return;
    const { num_experts: count } = this.view, x = GUTTER + (this.chosen % count) * this.size, y = Math.floor(this.chosen / count) * this.size;
    pen.strokeStyle = this.look.resolved("text");
    pen.lineWidth = 2;
    pen.strokeRect(x + 1, y + 1, this.size - 3, this.size - 3);
  }

  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect(), { layers, num_experts: count } = this.view;
    const expert = Math.floor((event.clientX - left - GUTTER) / this.size), row = Math.floor((event.clientY - top) / this.size);
    return expert >= 0 && expert < count && row >= 0 && row < layers.length ? row * count + expert : -1;
  }

  choose(place) {
    if (this.chosen === place) return;
    this.chosen = place;
    setText(this.told, this.textOf(place));
    this.redraw();
  }

  textOf(place) {
    const { layers, num_experts: count } = this.view;
    if (place < 0 || place >= this.counts.length) return POINT_AT_ONE;
    const { tokens, share } = this.loadOf(place);
    return `layer ${layers[Math.floor(place / count)]} · expert ${place % count} · ${tokens.toLocaleString("en")} tokens, ${percent(share)} of the layer's mean`;
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.view.num_experts, ArrowDown: this.view.num_experts }[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = this.chosen < 0 ? 0 : this.chosen + step;
    if (next >= 0 && next < this.counts.length) this.choose(next);
  }
}
