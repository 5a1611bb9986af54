// What the timeline knows, message by message; the oldest spans are dropped first.
import { Axis, NONE, TYPES, Table, lowerBound } from "./timeline_table.js";

const KINDS = ["bar", "detail", "wait", "bar", "instant"];  // by the message's kind: phase, detail, wait, device, instant
const LANE_LABELS = { host: "host", compute: "device compute", copy: "device copy" };

class Lane {
  constructor(name) {
    this.name = name;
    this.label = LANE_LABELS[name] || name;
    this.tables = {};  // bar, detail, wait, instant
  }

  // A device's waits: those for other ranks inside its work.
  get hasCollectives() { return this.name === "compute" && Boolean(this.tables.wait); }
}

class Group {
  constructor(name) {
    this.name = name;
    this.lanes = [];
    this.iterations = null;
    this.places = new Map();  // iteration number -> row, counted from the first one that ever came
    this.bubbles = null;
    this.blame = new Map();  // bubble's id -> [[label, ns], ...]
    this.numBubbles = 0;
    this.skipped = [];
    this.unfinished = [];
    this.inHand = null;
    this.now = 0;
  }

  lane(name) {
    let lane = this.lanes.find((one) => one.name === name);
    if (!lane) {
      lane = new Lane(name);
      this.lanes.push(lane);
      const order = Object.keys(LANE_LABELS), rank = (one) => (order.indexOf(one.name) + order.length + 1) % (order.length + 1);
      this.lanes.sort((left, right) => rank(left) - rank(right) || (left.name < right.name ? -1 : 1));
    }
    return lane;
  }

  // Row of an iteration's record; NONE while there is none.
  rowOf(number) {
    const place = this.places.get(number);
    return place === undefined ? NONE : place - this.iterations.dropped;
  }

  dropIterations(count) {
    for (let row = 0; row < count; row++) this.places.delete(this.iterations.number[row]);
    this.iterations.drop(count);
  }

  *tables() {
    for (const lane of this.lanes) yield* Object.values(lane.tables);
    if (this.iterations) yield this.iterations;
    if (this.bubbles) yield this.bubbles;
  }
}

export class Store {
  constructor(maxSpans, isCut) {
    this.maxSpans = maxSpans;
    this.axis = new Axis(isCut);
    this.reset([""]);
    this.expected = NONE;  // until a reset has come
  }

  reset(groups) {
    this.groups = groups.map((name) => new Group(name));
    this.texts = [];
    this.axis = new Axis(this.axis.isCut);
    this.numSpans = 0;
    this.isTrimmed = false;
    this.expected = 0;
  }

  // False: a message before this one is missing, and everything must be sent anew. Until it is, the rest is passed over.
  receive(content, buffers) {
    if (content.kind === "reset") { this.reset(content.groups); return true; }
    if (content.kind !== "append") return true;
    if (content.seq !== this.expected) {
      const isNew = this.expected !== NONE;
      this.expected = NONE;
      return !isNew;
    }
    this.expected++;
    this.texts.push(...content.texts);
    const group = this.groups[content.group], tables = decode(content.tables, buffers);
    eachRow(tables.pauses, (row, { start, end }) => this.axis.add(start[row], end[row]));
    eachRow(tables.skipped, (row, { start, end }) => { if (end[row] > start[row]) group.skipped.push([start[row], end[row]]); });
    if (tables.spans) this.addSpans(group, tables.spans);
    if (tables.iterations) this.addIterations(group, tables.iterations);
    if (tables.bubbles) this.addBubbles(group, tables.bubbles, tables.blame);
    group.unfinished = content.unfinished;
    for (const work of group.unfinished) group.lane(work.lane);
    group.inHand = content.inHand;
    group.now = content.now;
    this.trim();
    return true;
  }

  addSpans(group, { rows, columns, kinds }) {
    const parts = new Map();
    for (let row = 0; row < rows; row++) {
      const key = columns.lane[row] * KINDS.length + columns.kind[row];
      if (!parts.has(key)) parts.set(key, []);
      parts.get(key).push(row);
    }
    for (const [key, members] of parts) {
      const lane = group.lane(this.texts[Math.floor(key / KINDS.length)]), kind = KINDS[key % KINDS.length];
      lane.tables[kind] = lane.tables[kind] || new Table(kinds);
      lane.tables[kind].append(columns, members, this.axis);
    }
    this.numSpans += rows;
  }

  addIterations(group, { rows, columns, kinds }) {
    const table = group.iterations = group.iterations || new Table(kinds);
    const old = table.length, newest = old ? table.at[old - 1] : -Infinity;
    table.append(columns, all(rows), this.axis);
    // Behind a run come those of its stretches that were not sent, among those that are there.
    const first = old && this.axis.shown(columns.start[0]) < newest ? 0 : old;
    for (let row = first; row < table.length; row++) group.places.set(table.number[row], table.dropped + row);
  }

  addBubbles(group, { rows, columns, kinds }, blame) {
    const table = group.bubbles = group.bubbles || new Table({ ...kinds, id: "i4" });
    const first = group.numBubbles;
    table.append({ ...columns, id: Int32Array.from(all(rows), (row) => first + row) }, all(rows), this.axis);
    group.numBubbles += rows;
    eachRow(blame, (row, { bubble, label, time }) => {
      const id = first + bubble[row];
      if (!group.blame.has(id)) group.blame.set(id, []);
      group.blame.get(id).push([label[row], time[row]]);
    });
  }

  // Drop the oldest spans once there are too many, a tenth more than needed, and what belongs to their time.
  trim() {
    if (this.numSpans <= this.maxSpans) return;
    const excess = this.numSpans - 0.9 * this.maxSpans, limit = this.momentBehind(excess);
    for (const group of this.groups) {
      for (const table of group.tables()) {
        const begun = lowerBound(table.at, table.length, limit);
        if (table === group.iterations) { group.dropIterations(Math.max(0, begun - 1)); continue; }
        if (table === group.bubbles) for (let row = 0; row < begun; row++) group.blame.delete(table.id[row]);
        else this.numSpans -= begun;
        table.drop(begun);
      }
    }
    this.isTrimmed = true;
  }

  momentBehind(count) {
    let { from, to } = this.extent();
    for (let step = 0; step < 50; step++) {
      const middle = (from + to) / 2;
      let before = 0;
      for (const group of this.groups) for (const lane of group.lanes) for (const table of Object.values(lane.tables)) {
        before += lowerBound(table.at, table.length, middle);
      }
      if (before < count) from = middle; else to = middle;
    }
    return to;
  }

  cut(isCut) {
    this.axis.isCut = isCut;
    for (const group of this.groups) for (const table of group.tables()) table.place(this.axis);
  }

  // First and last moment as shown; with work that has not ended, until it was looked at last.
  extent() {
    let from = Infinity, to = -Infinity;
    for (const group of this.groups) {
      for (const table of group.tables()) {
        if (!table.length) continue;
        from = Math.min(from, table.at[0]);
        to = Math.max(to, table.till[table.length - 1], ...tailEnds(table));
      }
      if (group.unfinished.length) {
        from = Math.min(from, this.axis.shown(group.unfinished[0].enqueued));
        to = Math.max(to, this.axis.shown(group.now));
      }
    }
    return from < Infinity ? { from, to } : { from: 0, to: 0 };
  }

  get isEmpty() {
    return this.groups.every((group) => !group.unfinished.length && [...group.tables()].every((table) => !table.length));
  }

  get isBusy() { return this.groups.some((group) => group.unfinished.length || group.inHand); }
  get numIterations() { return this.groups.reduce((sum, group) => sum + (group.iterations ? group.iterations.length : 0), 0); }
  get hasSkipped() { return this.groups.some((group) => group.skipped.length); }
}

// Rows lie by their begin, so one of the last few may end after the last.
function tailEnds(table) { return table.till.subarray(Math.max(0, table.length - 8), table.length); }

function all(count) { return Array.from({ length: count }, (_, row) => row); }

function eachRow(table, use) {
  if (table) for (let row = 0; row < table.rows; row++) use(row, table.columns);
}

function decode(headers, buffers) {
  const tables = {}, bytes = buffers[0] || new ArrayBuffer(0);  // a DataView of all columns, one behind the other
  const whole = bytes.buffer || bytes;
  let begin = bytes.byteOffset || 0;
  for (const [name, { rows, columns: header }] of Object.entries(headers)) {
    const columns = {}, kinds = {};
    for (const [column, kind] of header) {
      const end = begin + rows * TYPES[kind].BYTES_PER_ELEMENT;
      columns[column] = new TYPES[kind](whole.slice(begin, end));  // copied: a column must begin at a multiple of its size
      kinds[column] = kind;
      begin = end;
    }
    tables[name] = { rows, columns, kinds };
  }
  return tables;
}
