// Columns of numbers that grow, and the axis of time that they lie on.
// Every time is in nanoseconds since the group's origin. `at` and `till` are times as shown: pauses are cut out of them.

export const TYPES = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };
export const NONE = -1;
const PAUSE_SHOWN = 100e3;  // what is left of a pause, ns

// Index of the first number that is not below `limit`, among the first `length` of a rising column.
export function lowerBound(column, length, limit) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < limit) low = middle + 1; else high = middle;
  }
  return low;
}

// Columns of one length, by `at`. Rows come nearly sorted: work of a device may be known late.
export class Table {
  constructor(kinds) {
    this.kinds = { ...kinds, at: "f8", till: "f8" };
    this.length = 0;
    this.reach = 0;  // longest row as shown: how far left of a moment one that lasts until then may begin
    this.dropped = 0;
    for (const [name, kind] of Object.entries(this.kinds)) this[name] = new TYPES[kind](256);
  }

  append(source, rows, axis) {
    const old = this.length;
    this.reserve(old + rows.length);
    for (const name of Object.keys(source)) {
      const from = source[name], to = this[name];
      for (let place = 0; place < rows.length; place++) to[old + place] = from[rows[place]];
    }
    this.length = old + rows.length;
    this.place(axis, old);
    this.sortFrom(old);
  }

  reserve(count) {
    if (count <= this.at.length) return;
    for (const [name, kind] of Object.entries(this.kinds)) {
      const larger = new TYPES[kind](2 * count);
      larger.set(this[name].subarray(0, this.length));
      this[name] = larger;
    }
  }

  place(axis, from = 0) {
    if (!from) this.reach = 0;
    for (let row = from; row < this.length; row++) {
      this.at[row] = axis.shown(this.start[row]);
      this.till[row] = axis.shown(this.end[row]);
      this.reach = Math.max(this.reach, this.till[row] - this.at[row]);
    }
  }

  // The rows before `first` are in order, those behind it perhaps not.
  sortFrom(first) {
    let lowest = this.length, newest = first ? this.at[first - 1] : -Infinity;
    for (let row = first; row < this.length; row++) {
      if (this.at[row] < newest) lowest = Math.min(lowest, lowerBound(this.at, first, this.at[row]));
      newest = Math.max(newest, this.at[row]);
    }
    if (lowest === this.length) return;
    const order = Array.from({ length: this.length - lowest }, (_, place) => lowest + place);
    order.sort((left, right) => this.at[left] - this.at[right] || left - right);
    for (const [name, kind] of Object.entries(this.kinds)) {
      const column = this[name];
      column.set(TYPES[kind].from(order, (row) => column[row]), lowest);
    }
  }

  drop(count) {
    if (!count) return;
    for (const name of Object.keys(this.kinds)) this[name].copyWithin(0, count, this.length);
    this.length -= count;
    this.dropped += count;
  }

  // First row that may reach into a view, and the row behind the last one that begins in it.
  visible(from, to) {
    return [lowerBound(this.at, this.length, from - this.reach), lowerBound(this.at, this.length, to)];
  }

  // The shortest row at a moment, give or take `slack`; NONE if there is none.
  hit(moment, slack = 0) {
    const [first, behind] = this.visible(moment - slack, moment + slack);
    let best = NONE;
    for (let row = first; row < behind || (row < this.length && this.at[row] <= moment + slack); row++) {
      if (this.till[row] < moment - slack) continue;
      if (best === NONE || this.till[row] - this.at[row] < this.till[best] - this.at[best]) best = row;
    }
    return best;
  }
}

// From times as they were to times as shown: without the pauses, of which a little is left.
export class Axis {
  constructor(isCut) { this.isCut = isCut; this.pauses = []; }

  add(start, end) {
    const last = this.pauses[this.pauses.length - 1];
    this.pauses.push({ start, end, removed: (last ? last.removed : 0) + Math.max(0, end - start - PAUSE_SHOWN) });
  }

  // How many pauses began before a moment.
  before(moment) {
    let low = 0, high = this.pauses.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pauses[middle].start < moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  shown(moment) {
    const last = this.isCut ? this.pauses[this.before(moment) - 1] : null;
    if (!last) return moment;
    if (moment >= last.end) return moment - last.removed;
    const length = last.end - last.start, left = Math.min(length, PAUSE_SHOWN);
    return last.start - (last.removed - length + left) + (moment - last.start) * left / length;
  }
}
