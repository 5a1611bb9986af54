// What is painted where: lanes, iterations, waits, bubbles, work that has not ended, pauses, the selection.
import { NONE } from "./timeline_table.js";
import { BOLD, FONT, RowColours } from "./timeline_look.js";
import { lengthText, momentText, waitText } from "./timeline_text.js";
import { Brush, GUTTER } from "./timeline_brush.js";
import { drawMarks, nameMarks } from "./timeline_marks.js";

const AXIS = 20, STRIP = 18, TITLE = 18, GAP = 5;
const HEIGHTS = { host: 30, compute: 30, copy: 14 }, OTHER_HEIGHT = 22, DETAILS = 12;
export const COLLECTIVE = 8;  // of a bar's height at its lower edge, below its words, px
const FEW_PAUSES = 6;  // that each gets its length written above it
const FADE = 70;  // px past now, of an iteration in hand

export class Painter extends Brush {
  constructor(canvas, store, look, texts) {
    super(canvas, store, look);
    Object.assign(this, { texts, blocks: [], boxes: [] });
  }

  // Lanes of each group from top to bottom; returns the height of all.
  layout() {
    let y = AXIS;
    this.blocks = this.store.groups.map((group) => {
      const block = { group, top: y, lanes: [] };
      if (group.name) y += TITLE;
      block.strip = y;
      y += STRIP + GAP;
      for (const lane of shownLanes(group)) {
        const height = HEIGHTS[lane.name] || OTHER_HEIGHT, details = lane.name === "host" || lane.tables.detail ? DETAILS + 1 : 0;
        block.lanes.push({ lane, top: y, height, details });
        y += height + details + GAP;
      }
      block.bottom = y - GAP;
      y += 2 * GAP;
      return block;
    });
    return y - GAP;
  }

  draw(view, selected) {
    this.resize(this.layout());
    if (!this.width) return;
    const { pen, scale } = this;
    this.aim(view);
    this.selected = selected;
    this.boxes = [];  // what is painted without a scale: where it is, and what it says
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = this.look.page;
    pen.fillRect(0, 0, this.width, this.height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    if (!this.store.isEmpty) this.drawGrid();
    for (const block of this.blocks) this.drawBlock(block);
    this.taken = [];
    if (this.blocks.length === 1) nameMarks(this, this.blocks[0]);  // of several runs nobody could tell whose they are
    this.drawPauses();
    if (!this.store.isEmpty) this.drawMoments();
    for (const block of this.blocks) this.drawNames(block);
  }

  drawBlock(block) {
    const { pen, look, width } = this;
    pen.fillStyle = look.lane;
    for (const { top, height, details } of block.lanes) pen.fillRect(GUTTER, top, width - GUTTER, height + details);
    this.drawBorders(block);
    for (const placed of block.lanes) this.drawLane(block, placed);
    this.drawBubbles(block);
    this.drawSkipped(block);
    this.drawIterations(block);
    this.drawUnfinished(block);
    this.drawSelection(block);
    drawMarks(this, block, STRIP);
  }

  drawLane(block, { lane, top, height, details }) {
    const colours = new RowColours(this.store, this.look, lane), { bar, detail, wait } = lane.tables, { texts } = this.store;
    const named = (row) => [`${texts[bar.name[row]]} ${bar.iteration[row]}`, String(bar.iteration[row])];
    const cover = lane.name === "host" ? null : (row) => (this.look.dummies.has(texts[bar.name[row]]) ? "dummy" : null);
    const isForRanks = (row) => texts[wait.name[row]] === this.look.ranksWait;
    if (bar) this.sweep(bar, top, height, (row) => colours.of(bar, row), lane.name === "host" || height < 17 ? null : named, null, cover);
    if (lane.hasCollectives) this.sweep(wait, top + height - COLLECTIVE, COLLECTIVE, () => this.look.under("ranks"), null, null, () => "ranks");
    else if (wait) this.sweepHatched(wait, top, height, (row) => (isForRanks(row) ? "ranks" : "wait"), (row) => [waitText(texts[wait.name[row]], this.look), "waits"]);
    if (bar && lane.name === "host") this.nameHostWork(bar, wait, colours, top + height / 2);
    if (!detail) return;
    const inner = (row) => Math.min(3 * (detail.depth[row] - 1), DETAILS - 4);
    this.sweep(detail, top + height + 1, details - 1, (row) => colours.of(detail, row), (row) => [texts[detail.name[row]]], inner);
  }

  // In the longest piece of a phase that no wait lies over.
  nameHostWork(bar, wait, colours, middle) {
    this.eachVisible(bar, (row, left, right) => {
      if (right - left < 18) return;
      const [from, to] = wait ? freePiece(bar, row, wait) : [bar.at[row], bar.till[row]];
      const low = Math.max(this.x(from), GUTTER), high = Math.min(this.x(to), this.width);
      this.label([this.store.texts[bar.name[row]]], low, high, middle, this.look.ink(colours.of(bar, row)));
    });
  }

  drawBubbles({ group, lanes }) {
    const placed = lanes.find(({ lane }) => lane.name === "compute"), table = group.bubbles;
    if (!table || !placed) return;
    this.sweepHatched(table, placed.top, placed.height, () => "bubble", (row) => [`idle ${lengthText(table.end[row] - table.start[row])}`, "idle"]);
  }

  drawSkipped({ group, lanes }) {
    const { axis } = this.store;
    for (const [start, end] of group.skipped) {
      const left = this.x(axis.shown(start)), right = this.x(axis.shown(end));
      if (right < GUTTER || left > this.width) continue;
      lanes.forEach(({ top, height }, place) => {
        this.hatched(left, right, top, height, "line", place ? [] : ["not sent while running", "not sent"]);
      });
    }
  }

  // A thin line where an iteration begins, through all lanes.
  drawBorders({ group, strip, bottom }) {
    if (!group.iterations) return;
    this.pen.fillStyle = this.look.line;
    this.eachVisible(group.iterations, (row, left, right) => {
      if (right - left > 24 && left >= GUTTER) this.pen.fillRect(Math.round(left) - 0.5, strip, 1, bottom - strip);
    });
  }

  drawIterations({ group, strip }) {
    const table = group.iterations, { look, pen } = this, { texts, axis } = this.store;
    pen.fillStyle = look.lane;
    pen.fillRect(GUTTER, strip, this.width - GUTTER, STRIP);
    if (table) {
      const label = (row) => {
        const number = String(table.number[row]), named = `${number} ${texts[table.order[row]]}`;
        return table.void[row] === NONE ? [named, number] : [`${named}, not timed`, named, number];
      };
      this.sweep(table, strip, STRIP, (row) => look.order(texts[table.order[row]]), label);
    }
    const hand = group.inHand;
    if (!hand) return;
    const left = this.x(axis.shown(hand.begin)), right = Math.max(this.x(axis.shown(group.now)), left) + FADE;
    this.openBar(left, right, strip, STRIP, look.order(hand.order), [`${hand.iteration} ${hand.order}`, String(hand.iteration)]);
    this.boxes.push({ left, right, top: strip, bottom: strip + STRIP, lines: () => this.texts.inHand(hand), iteration: hand.iteration });
  }

  // What the device has not ended: the oldest runs on past now, the others stand in line behind it, not to scale.
  drawUnfinished(block) {
    const { group } = block, { look, pen } = this;
    if (!group.unfinished.length) return;
    const now = this.x(this.store.axis.shown(group.now));
    for (const placed of block.lanes) this.drawLine(group, placed, now);
    if (now < GUTTER || now > this.width) return;
    pen.strokeStyle = look.now;
    pen.setLineDash([2, 3]);
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(now, block.strip - 3);
    pen.lineTo(now, block.bottom);
    pen.stroke();
    pen.setLineDash([]);
  }

  drawLine(group, placed, now) {
    const { pen, look } = this, works = group.unfinished.filter((work) => work.lane === placed.lane.name);
    const wishes = works.map((work) => look.width(pen, `${work.name} ${work.iteration}`) + 16);
    const squeeze = Math.min(1, Math.max(60, this.width - now - 8) / wishes.reduce((sum, one) => sum + one, 0));
    let left = now;
    works.forEach((work, place) => {
      const right = left + squeeze * wishes[place], begun = work.runs ? this.begunAt(group, placed.lane, work) : left;
      this.unfinishedBar(group, placed, work, Math.min(begun, left), right);
      left = right;
    });
  }

  // No sooner than it was enqueued, nor than the work before it on its stream had ended.
  begunAt(group, lane, work) {
    const { bar } = lane.tables, last = bar && bar.length ? bar.end[bar.length - 1] : -Infinity;
    return this.x(this.store.axis.shown(Math.min(group.now, Math.max(work.enqueued, last))));
  }

  unfinishedBar(group, { lane, top, height }, work, left, right) {
    const { pen, look } = this, colour = look.work(work.name, lane.name, "other"), words = height > 16 ? [`${work.name} ${work.iteration}`, work.name] : [];
    const from = Math.max(left, GUTTER);
    if (work.runs) this.openBar(left, right, top, height, colour, words);
    else if (right > GUTTER + 4 && left < this.width) {
      pen.strokeStyle = colour;
      pen.lineWidth = 1.5;
      pen.setLineDash([4, 3]);
      pen.strokeRect(from + 2, top + 1, right - from - 4, height - 2);
      pen.setLineDash([]);
      this.label(words, from + 2, right, top + height / 2, look.text);
    }
    this.boxes.push({ left, right, top, bottom: top + height, lines: () => this.texts.unfinished(group, lane, work), iteration: work.iteration });
  }

  drawSelection({ group, strip, bottom }) {
    const { pen, look } = this, row = this.selected === null || !group.iterations ? NONE : group.rowOf(this.selected);
    if (row === NONE) return;
    const left = Math.max(GUTTER, this.x(group.iterations.at[row])), right = Math.min(this.width, this.x(group.iterations.till[row]));
    if (right < GUTTER || left > this.width) return;
    const wide = Math.max(right - left, 2);
    pen.globalAlpha = 0.13;
    pen.fillStyle = look.accent;
    pen.fillRect(left, strip, wide, bottom - strip);
    pen.globalAlpha = 1;
    pen.strokeStyle = look.accent;
    pen.lineWidth = 2;
    pen.strokeRect(left, strip, wide, STRIP);
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, strip, Math.max(wide - 1, 1), bottom - strip);
  }

  // Dotted lines where a pause was cut out, and its length above them where there is room.
  drawPauses() {
    const { axis } = this.store, { pen, look } = this;
    if (!axis.isCut || !this.blocks.length) return;
    pen.strokeStyle = look.soft;
    pen.lineWidth = 1;
    const placed = axis.pauses.map(({ start, end }) => [this.x(axis.shown(start)), this.x(axis.shown(end)), end - start]);
    const visible = placed.filter(([left, right]) => right >= GUTTER && left <= this.width);
    for (const [left, right, length] of visible) {
      this.dotted(right - left > 6 ? [left, right] : [(left + right) / 2]);
      const text = `pause ${lengthText(length)}`, half = look.width(pen, text) / 2;
      if (visible.length <= FEW_PAUSES || half < right - left) this.aboveLanes(text, (left + right) / 2 - half, look.text);
    }
  }

  dotted(places) {
    const { pen } = this, bottom = this.blocks[this.blocks.length - 1].bottom;
    pen.setLineDash([1, 3]);
    pen.beginPath();
    for (const x of places.filter((one) => one >= GUTTER)) { pen.moveTo(x, AXIS - 4); pen.lineTo(x, bottom); }
    pen.stroke();
    pen.setLineDash([]);
  }

  // Words in the row of the axis, unless others are there already.
  aboveLanes(text, left, colour) {
    const right = left + this.look.width(this.pen, text);
    if (left < GUTTER || right > this.width - 2 || this.taken.some((other) => left < other[1] + 6 && right > other[0] - 6)) return;
    this.taken.push([left, right]);
    this.pen.fillStyle = colour;
    this.pen.fillText(text, left, 8);
  }

  // [moment, x] of each mark, and how far they are apart.
  ticks() {
    const { view } = this, rough = (view.to - view.from) / Math.max(2, (this.width - GUTTER) / 115);
    const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
    const first = Math.ceil(Math.max(view.from, -step / 2) / step), last = Math.floor(view.to / step);
    return { step, marks: Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => [(first + at) * step, this.x((first + at) * step)]) };
  }

  drawGrid() {
    this.pen.fillStyle = this.look.line;
    for (const [, x] of this.ticks().marks) this.pen.fillRect(x, AXIS - 6, 1, this.height);
  }

  drawMoments() {
    const { step, marks } = this.ticks();
    for (const [moment, x] of marks) this.aboveLanes(momentText(moment, step, this.view.to), x + 3, this.look.soft);
  }

  drawNames({ group, top, strip, bottom, lanes }) {
    const { pen, look } = this;
    pen.fillStyle = look.page;
    pen.fillRect(0, strip - 5, GUTTER, bottom - strip + 8);
    if (group.name) {
      pen.fillStyle = look.text;
      pen.font = BOLD;
      this.fitted(group.name, 0, top + TITLE / 2, 400);
      pen.font = FONT;
    }
    pen.fillStyle = look.soft;
    this.fitted("iterations", 0, strip + STRIP / 2, GUTTER - 6);
    for (const { lane, top: y, height } of lanes) this.fitted(lane.label, 0, y + height / 2, GUTTER - 6);
  }
}

// Host and device lanes are there from the start, others once something is in them.
function shownLanes(group) {
  for (const name of ["host", "compute"]) group.lane(name);
  return group.lanes;
}

function freePiece(bar, row, wait) {
  const [first, behind] = wait.visible(bar.at[row], bar.till[row]);
  let from = bar.at[row], best = [from, from];
  for (let at = first; at <= behind; at++) {
    const until = at < behind ? Math.min(wait.at[at], bar.till[row]) : bar.till[row];
    if (until - from > best[1] - best[0]) best = [from, until];
    if (at < behind) from = Math.max(from, wait.till[at]);
  }
  return best;
}
