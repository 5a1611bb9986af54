import { NONE } from "./timeline_table.js";

// One pixel column's worth of thin bars, and the run of like columns before it.
export class Dust {
  constructor(pen, top, tall, least = 0.4) {
    Object.assign(this, { pen, top, tall, least, column: NONE, filled: 0, colour: "", most: 0, sums: new Map() });
    this.run = { from: 0, to: NONE, colour: "", strength: 0 };
  }

  add(left, wide, colour) {
    const column = Math.floor(left);
    if (column !== this.column) { this.close(); this.column = column; }
    const width = Math.max(wide, 0.02), sum = (this.sums.get(colour) || 0) + width;
    this.filled += width;
    this.sums.set(colour, sum);
    if (sum > this.most) { this.most = sum; this.colour = colour; }
  }

  close() {
    if (this.column === NONE) return;
    const strength = Math.ceil(16 * Math.min(1, Math.max(this.least, this.filled))) / 16, { run } = this;
    if (run.to === this.column && run.colour === this.colour && run.strength === strength) run.to++;
    else {
      this.paint();
      this.run = { from: this.column, to: this.column + 1, colour: this.colour, strength };
    }
    this.column = NONE;
    this.filled = this.most = 0;
    this.sums.clear();
  }

  paint() {
    const { pen, run } = this;
    if (run.to === NONE) return;
    pen.globalAlpha = run.strength;
    pen.fillStyle = run.colour;
    pen.fillRect(run.from, this.top, run.to - run.from, this.tall);
    pen.globalAlpha = 1;
  }

  flush() { this.close(); this.paint(); this.run.to = NONE; }
}
