// How bars, hatches and words are put on the canvas, at the place that the view gives them.
import { Dust } from "./timeline_dust.js";

export const GUTTER = 104;  // px left of the lanes, for their names
const THINNEST = 0.75;  // a lone bar is never painted thinner, px
const LABELLED = 18;  // nor one with words narrower
const FAINTEST = 0.12;  // strength of a pixel column that is hardly covered

export class Brush {
  constructor(canvas, store, look) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    Object.assign(this, { store, look, width: 0, height: 0, view: null, selected: null });
  }

  // Take the canvas's place on the page, at the screen's own resolution.
  resize(height) {
    const scale = window.devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.canvas.style.height = `${height}px`;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== size[0]) this.canvas.width = size[0];
    if (this.canvas.height !== size[1]) this.canvas.height = size[1];
    Object.assign(this, { width, height, scale });
  }

  aim(view) {
    this.view = view;
    this.perPixel = (this.width - GUTTER) / (view.to - view.from);
  }

  x(shown) { return GUTTER + (shown - this.view.from) * this.perPixel; }
  shownAt(x) { return this.view.from + (x - GUTTER) / this.perPixel; }

  // Bars of a pixel and more one by one. Thinner ones are gathered, a pixel column at a time: the column takes the colour
  // that fills most of it, and is the stronger the more of it is filled.
  // Those that `coverOf` has a hatch for are hatched.
  sweep(table, top, tall, colourOf, labelOf, innerOf = null, coverOf = null) {
    const { view, pen } = this, { at, till } = table;
    const [first, behind] = table.visible(view.from, view.to), dust = new Dust(pen, top, tall);
    for (let row = first; row < behind; row++) {
      if (till[row] < view.from) continue;
      const left = GUTTER + (at[row] - view.from) * this.perPixel, right = GUTTER + (till[row] - view.from) * this.perPixel;
      if (right - left < 1) { if (left >= GUTTER) dust.add(left, right - left, colourOf(row)); continue; }
      dust.flush();
      const inner = innerOf ? innerOf(row) : 0;
      this.bar(left, right, top + inner, tall - inner, colourOf(row), labelOf && right - left > LABELLED ? labelOf(row) : [], coverOf && coverOf(row));
      if (this.selected !== null && table.iteration && table.iteration[row] === this.selected) this.underline(left, right, top + tall);
    }
    dust.flush();
  }

  bar(left, right, top, tall, colour, texts, cover = null) {
    const { pen } = this, from = Math.max(left, GUTTER), wide = Math.min(right, this.width + 1) - from;
    pen.fillStyle = colour;
    pen.fillRect(from, top, wide > 4 ? wide - 0.8 : Math.max(wide, THINNEST), tall);
    if (cover && wide > 4) {
      pen.fillStyle = this.look.hatch(pen, cover);
      pen.fillRect(from, top, wide - 0.8, tall);
    }
    this.label(texts, from, Math.min(right, this.width), top + tall / 2, this.look.ink(colour), cover && colour);
  }

  // The first of some texts that fits, on a plate where one is asked for.
  label(texts, from, to, middle, colour, plate = null) {
    const { pen } = this, shown = texts.find((text) => this.look.width(pen, text) <= to - from - 7);
    if (!shown) return;
    if (plate) {
      pen.fillStyle = plate;
      pen.fillRect(from + 2, middle - 7.5, this.look.width(pen, shown) + 4, 15);
    }
    pen.fillStyle = colour;
    pen.fillText(shown, from + 4, middle + 0.5);
  }

  underline(left, right, bottom) {
    this.pen.fillStyle = this.look.text;
    this.pen.fillRect(Math.max(left, GUTTER), bottom - 2, Math.min(right, this.width) - Math.max(left, GUTTER) - 0.8, 2);
  }

  // Fades out to the right: it has not ended.
  openBar(left, right, top, tall, colour, texts) {
    const { pen } = this, from = Math.max(left, GUTTER);
    if (right <= from || from > this.width) return;
    const fade = pen.createLinearGradient(right - Math.min(60, right - from), 0, right, 0);
    fade.addColorStop(0, colour);
    fade.addColorStop(1, `${colour}00`);
    pen.fillStyle = fade;
    pen.fillRect(from, top, right - from, tall);
    this.label(texts, from, right - 16, top + tall / 2, this.look.ink(colour));
  }

  // A hatched stretch over what lies under it, with words on a plate where they fit.
  hatched(left, right, top, tall, name, words) {
    const { pen, look } = this, from = Math.max(left, GUTTER), to = Math.min(right, this.width);
    if (to - from < 0.3) return;
    pen.fillStyle = look.under(name);
    pen.fillRect(from, top, to - from, tall);
    pen.fillStyle = to - from < 3 ? look[name] : look.hatch(pen, name);
    pen.fillRect(from, top, to - from, tall);
    const shown = words.find((text) => look.width(pen, text) + 18 < to - from);
    if (!shown || tall < 14) return;
    const size = look.width(pen, shown), x = (from + to - size) / 2;
    pen.fillStyle = look.lane;
    pen.fillRect(x - 4, top + tall / 2 - 7.5, size + 8, 15);
    pen.fillStyle = name === "bubble" ? look.bubble : look.text;
    pen.fillText(shown, x, top + tall / 2 + 0.5);
  }

  eachVisible(table, use) {
    const { view } = this, [first, behind] = table.visible(view.from, view.to);
    for (let row = first; row < behind; row++) {
      if (table.till[row] >= view.from) use(row, this.x(table.at[row]), this.x(table.till[row]));
    }
  }

  // As `sweep`, for stretches that lie over others: a column's strength is the share that they cover.
  sweepHatched(table, top, tall, nameOf, wordsOf) {
    const dust = new Dust(this.pen, top, tall, FAINTEST);
    this.eachVisible(table, (row, left, right) => {
      const name = nameOf(row);
      if (right - left < 2) { if (left >= GUTTER) dust.add(left, right - left, this.look[name]); return; }
      dust.flush();
      this.hatched(left, right, top, tall, name, right - left > LABELLED ? wordsOf(row) : []);
    });
    dust.flush();
  }

  // Shortened at its end, never squeezed.
  fitted(text, x, y, room) {
    let shown = text;
    while (shown.length > 1 && this.pen.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
    this.pen.fillText(shown, x, y);
  }
}
