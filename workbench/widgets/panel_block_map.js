// All blocks of the pool on a canvas: a square each, in its holder's hue as far up as it is filled. One with several
// holders is framed and numbered with how many they are; a cached one that nobody holds is hatched.
import { hueLetter } from "./panel_hues.js";

export const CACHED = 254, FREE = 255;  // kinds that are no hue, as in workbench/panel/blocks_view.py
const LARGEST = 24, SMALLEST = 4, LETTERED = 14, FRAMED = 8, MOST_BELOW = 120;  // px

export class BlockMap {
  constructor(canvas, look) {
    Object.assign(this, { canvas, look, numBlocks: 0, kinds: [], refs: null, fill: [], lit: null, chosen: -1, frame: 0 });
  }

  // A kind, how many hold it (null: none has several) and the share that is filled, of each block.
  show(kinds, refs, fill) {
    Object.assign(this, { kinds, refs, fill, numBlocks: kinds.length });
    this.redraw();
  }

  redraw() { if (!this.frame) this.frame = requestAnimationFrame(() => this.paint()); }

  stop() { cancelAnimationFrame(this.frame); }

  // Squares as large as let all of them be seen at once in the place there is; larger pools scroll.
  layOut() {
    const wide = Math.floor(this.canvas.parentElement.clientWidth), tall = this.canvas.closest(".wb-scroll").clientHeight - 2 - this.below();
    const lay = (size) => { this.size = size; this.columns = Math.max(1, Math.floor(wide / size)); this.rows = Math.ceil(this.numBlocks / this.columns); };
    lay(LARGEST);
    while (this.size > SMALLEST && this.rows * this.size > tall) lay(this.size - 1);
    this.fitCanvas(this.columns * this.size, this.rows * this.size);
  }

  // What stands below the map is to be seen with it, unless it is much.
  below() {
    const next = this.canvas.parentElement.nextElementSibling;
    return next ? Math.min(MOST_BELOW, next.offsetHeight) : 0;
  }

  fitCanvas(wide, tall) {
    const scale = window.devicePixelRatio || 1, { canvas } = this;
    if (canvas.width === Math.round(wide * scale) && canvas.height === Math.round(tall * scale)) return;
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(tall * scale);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${tall}px`;
  }

  paint() {
    this.frame = 0;
    if (!this.canvas.parentElement || !this.canvas.parentElement.clientWidth) return;
    const begin = performance.now(), scale = window.devicePixelRatio || 1, pen = this.canvas.getContext("2d");
    this.layOut();
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.colours = Array.from({ length: 12 }, (_, hue) => [this.look.resolved(`hue-${hue}`), this.look.resolved(`ink-${hue}`)]);
    for (let block = 0; block < this.numBlocks; block++) this.paintBlock(pen, block);
    this.paintChosen(pen);
    this.paintTime = performance.now() - begin;
  }

  place(block) { return [(block % this.columns) * this.size, Math.floor(block / this.columns) * this.size]; }

  paintBlock(pen, block) {
    const [x, y] = this.place(block), side = this.size - 1, hue = this.kinds[block];
    if (hue >= CACHED) { this.paintUnheld(pen, x, y, side, hue === CACHED); return; }
    const numHolders = this.refs ? this.refs[block] : 1;
    const tall = Math.max(1, Math.round(side * Math.min(1, this.fill[block]))), [fill, ink] = this.colours[hue];
    pen.globalAlpha = this.lit && !this.lit.has(block) ? 0.2 : 1;
    pen.fillStyle = fill;
    pen.globalAlpha *= 0.3;
    pen.fillRect(x, y, side, side - tall);
    pen.globalAlpha /= 0.3;
    pen.fillRect(x, y + side - tall, side, tall);
    if (numHolders > 1) this.paintShared(pen, x, y, side);
    if (side >= LETTERED) this.paintLetter(pen, x, y, side, numHolders > 1 ? holdersText(numHolders) : hueLetter(hue), tall === side ? ink : null);
    pen.globalAlpha = 1;
  }

  // Too small for a frame, it is painted over.
  paintShared(pen, x, y, side) {
    pen.strokeStyle = pen.fillStyle = this.look.text;
    if (side < FRAMED) { pen.fillRect(x, y, side, side); return; }
    pen.lineWidth = 2;
    pen.strokeRect(x + 1, y + 1, side - 2, side - 2);
    pen.lineWidth = 1;
    pen.strokeStyle = this.look.page;  // so that the frame is seen on a hue as dark as itself
    if (side >= LETTERED) pen.strokeRect(x + 2.5, y + 2.5, side - 5, side - 5);
  }

  paintUnheld(pen, x, y, side, isCached) {
    pen.strokeStyle = pen.fillStyle = this.look.wait;  // the page's line colour is too faint for a map without holders
    if (isCached && side >= FRAMED) {
      pen.fillStyle = this.look.hatch(pen, "wait");
      pen.fillRect(x, y, side, side);
    }
    pen.globalAlpha = isCached ? 0.9 : 0.5;
    if (side >= 6) pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    else if (isCached) pen.fillRect(x, y, side, side);
    else pen.fillRect(x + side / 2 - 0.5, y + side / 2 - 0.5, 1, 1);
    pen.globalAlpha = 1;
  }

  // `ink` null: on two colours, so with a rim.
  paintLetter(pen, x, y, side, letter, ink) {
    pen.fillStyle = ink || this.look.text;
    pen.font = `600 ${Math.min(12, side - 4)}px system-ui, 'DejaVu Sans', sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    if (!ink) {
      pen.lineWidth = 3;
      pen.strokeStyle = this.look.page;
      pen.strokeText(letter, x + side / 2, y + side / 2 + 1);
      pen.lineWidth = 1;
    }
    pen.fillText(letter, x + side / 2, y + side / 2 + 1);
  }

  paintChosen(pen) {
    if (this.chosen < 0 || this.chosen >= this.numBlocks) return;
    const [x, y] = this.place(this.chosen), side = this.size - 1;
    pen.lineWidth = 2;
    pen.strokeStyle = this.look.text;
    pen.strokeRect(x, y, side, side);
    pen.lineWidth = 1;
  }

  // The block under a pointer; -1: none.
  blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size), row = Math.floor((event.clientY - box.top) / this.size);
    const block = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && block < this.numBlocks ? block : -1;
  }
}

// Of 255 there may be more.
function holdersText(count) { return count < 100 ? String(count) : "99+"; }
