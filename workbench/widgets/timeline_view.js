// The stretch of time in view, and how it is moved.

const LEAST = 200;  // ns
const NEWEST = 6;  // iterations that following shows at first, or those behind the last stretch that was not sent
const MARGIN = 0.02, COMING = 0.24;  // room at the right: behind the newest, and for work that has not ended

export class View {
  constructor(store) {
    this.store = store;
    this.from = 0;
    this.to = 1e6;
    this.isChosen = false;  // whether a person has chosen the length
  }

  get length() { return this.to - this.from; }

  show(from, to) {
    const least = Math.max(LEAST - (to - from), 0) / 2;
    this.from = from - least;
    this.to = to + least;
  }

  // Everything there is.
  fit() {
    const { from, to } = this.store.extent(), length = Math.max(to - from, LEAST);
    this.show(from - MARGIN * length, to + (this.store.isBusy ? COMING : MARGIN) * length);
  }

  // The newest at the right; the length stays, unless nobody has chosen one yet.
  followNewest() {
    const { from, to } = this.store.extent();
    const length = this.isChosen ? this.length : this.newestLength(from, to), room = (this.store.isBusy ? COMING : MARGIN) * length;
    this.show(to + room - length, to + room);
  }

  newestLength(from, to) {
    const begins = this.store.groups.flatMap((group) => {
      const table = group.iterations, skipped = group.skipped[group.skipped.length - 1];
      return table && table.length > NEWEST ? [Math.max(table.at[table.length - NEWEST], skipped ? this.store.axis.shown(skipped[1]) : from)] : [];
    });
    const begin = begins.length === this.store.groups.length ? Math.min(...begins) : from;
    return Math.max(to - begin, LEAST) * (this.store.isBusy ? 1 / (1 - COMING) : 1 + 2 * MARGIN);
  }

  zoom(factor, around) {
    const { from, to } = this.store.extent(), most = Math.max(1.5 * (to - from), 1e6);
    const kept = Math.min(Math.max(factor, LEAST / this.length), most / this.length);
    this.isChosen = true;
    this.show(around - (around - this.from) * kept, around + (this.to - around) * kept);
  }

  // Never so far that nothing at all is left to see.
  pan(part) {
    const { from, to } = this.store.extent(), edge = 0.9 * this.length;
    const shift = Math.min(Math.max(part * this.length, from - edge - this.from), to + edge - this.to);
    this.show(this.from + shift, this.to + shift);
  }

  // Bring a stretch into view if it is not; `isClose`: fill the view with it.
  reveal(from, to, isClose = false) {
    if (isClose) {
      const margin = 0.15 * (to - from);
      this.isChosen = true;
      this.show(from - margin, to + margin);
    } else if (from < this.from || to > this.to) {
      const length = Math.max(this.length, 1.3 * (to - from)), middle = (from + to) / 2;
      this.show(middle - length / 2, middle + length / 2);
    }
  }
}
