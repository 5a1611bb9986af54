// What is said about a thing under the pointer, and about a selected iteration: lines, the first of them a title.
import { NONE } from "./timeline_table.js";

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

export function lengthText(ns) {
  const [size, unit] = UNITS.find(([least]) => Math.abs(ns) >= least) || UNITS[3];
  return `${(ns / size).toLocaleString("en", { maximumSignificantDigits: 4 })} ${unit}`;
}

// A moment on an axis whose marks are `step` apart and reach to `most`: as many digits as tell neighbours apart.
export function momentText(ns, step, most) {
  let unit = step >= 1e8 ? 0 : step >= 1e5 ? 1 : step >= 1e2 ? 2 : 3;
  while (unit && most / UNITS[unit][0] > 1e5) unit--;
  const [size, name] = UNITS[unit], digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  const number = (ns / size).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${number.replace("-", "−")} ${name}`;
}

// What the host waits for.
export function waitText(name, look) { return `waits for ${name === look.ranksWait ? "other ranks" : name}`; }

const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

function batchText(table, row, which) {
  if (table[`${which}From`][row] === NONE) return null;
  return `${counted(table[`${which}Tokens`][row], "token")}, ${table[`${which}Prefill`][row]} prefill and `
    + `${counted(table[`${which}Decode`][row], "decode row")}`;
}

export class Texts {
  constructor(store, look) { this.store = store; this.look = look; }

  of(index) { return index === NONE ? "" : this.store.texts[index]; }

  // "rank 1 · host" where there are several.
  laneText(group, lane) { return this.store.groups.length > 1 && group.name ? `${group.name} · ${lane.label}` : lane.label; }

  // "iteration 12, overlap: steady_decode"
  iterationName(group, number) {
    if (number < 0) return "outside every iteration";
    const row = group.rowOf(number), hand = group.inHand;
    if (row !== NONE) return `iteration ${number}, ${this.of(group.iterations.order[row])}: ${this.of(group.iterations.reason[row])}`;
    if (hand && hand.iteration === number) return `iteration ${number}, ${hand.order}: ${hand.reason} (in hand)`;
    return `iteration ${number}`;
  }

  graphText(table, row) {
    if (table.graph[row] === NONE) return null;
    const padding = table.padding[row];
    const text = this.of(table.graph[row]), how = text.startsWith("eager: ") ? text.replace("eager", "eagerly") : `as ${text}`;
    return `ran ${how}${padding ? `, ${padding} of padding` : ""}`;
  }

  // The batch that a piece of work belongs to, and how its forward ran.
  workLines(group, name, number) {
    const which = this.look.batchOf[name], row = group.rowOf(number);
    if (!which || row === NONE) return [];
    const batch = batchText(group.iterations, row, which);
    const lines = batch ? [`batch: ${batch}`] : [];
    if (name === "forward" && this.graphText(group.iterations, row)) lines.push(this.graphText(group.iterations, row));
    return lines;
  }

  span(group, lane, kind, table, row) {
    const name = this.of(table.name[row]), number = table.iteration[row], length = table.end[row] - table.start[row];
    const isCollective = kind === "wait" && lane.hasCollectives;
    const title = isCollective ? `${name} for ${this.of(table.phase[row])}` : kind === "wait" ? waitText(name, this.look) : lane.name === "host" ? name : `${name} ${number < 0 ? "" : number}`;
    const lines = [`${title} · ${this.laneText(group, lane)}`];
    if (this.look.dummies.has(name)) lines.push("dummy work: no row of this rank, other ranks need its experts");
    lines.push(kind === "instant" ? `at ${lengthText(table.start[row])}` : lengthText(length) + this.waitText(lane, kind, table, row, length));
    lines.push(this.iterationName(group, number));
    if (isCollective) return [...lines, "from when this rank came to it until it went on: all ranks had come by then"];
    if (!Number.isNaN(table.enqueued[row])) lines.push(this.delayText(table, row));
    else if (kind !== "bar" && table.phase[row] !== NONE) lines.push(`in ${this.of(table.phase[row])}`);
    lines.push(...this.workLines(group, name, number));
    if (table.note[row] !== NONE) lines.push(this.of(table.note[row]));
    return lines;
  }

  delayText(table, row) {
    const delay = table.start[row] - table.enqueued[row];  // negative: it began before the host had come back
    return delay > 0 ? `enqueued ${lengthText(delay)} before it began` : "began as it was enqueued";
  }

  waitText(lane, kind, table, row, length) {
    const waits = lane.tables.wait;
    if (lane.name !== "host" || kind !== "bar" || !waits) return "";
    let waited = 0;
    const [first, behind] = waits.visible(table.at[row], table.till[row]);
    for (let at = first; at < behind; at++) {
      if (waits.start[at] >= table.start[row] && waits.end[at] <= table.end[row]) waited += waits.end[at] - waits.start[at];
    }
    return waited ? `, of which ${lengthText(Math.min(waited, length))} waiting` : "";
  }

  bubble(group, row) {
    const table = group.bubbles, length = table.end[row] - table.start[row], late = table.late[row];
    const lines = [`device idle · ${lengthText(length)}`,
      `before ${this.of(table.before[row])} of iteration ${table.iteration[row]}, ${this.of(table.order[row])}`,
      `why: ${this.of(table.reason[row])}`];
    if (late) lines.push(`nothing was enqueued for ${lengthText(late)}; the host meanwhile:`);
    for (const [label, time] of group.blame.get(table.id[row]) || []) lines.push(`· ${this.of(label)} ${lengthText(time)}`);
    if (length > late) lines.push(`launch latency ${lengthText(length - late)}`);
    return lines;
  }

  iteration(group, row) {
    const table = group.iterations, tokens = table.newTokens[row];
    const lines = [`iteration ${table.number[row]} · ${this.of(table.order[row])}`, `why: ${this.of(table.reason[row])}`,
      `${lengthText(table.end[row] - table.start[row])}, mode ${this.of(table.mode[row])}`];
    for (const which of ["consumed", "launched"]) {
      const batch = batchText(table, row, which), from = table[`${which}From`][row];
      if (batch) lines.push(which === "consumed" ? `sampled the forward of iteration ${from}: ${batch}` : `launched: ${batch}`);
    }
    if (this.graphText(table, row)) lines.push(this.graphText(table, row));
    lines.push(counted(tokens, "new token"));
    if (table.wasted[row] !== NONE) lines.push(`wasted rows: ${this.of(table.wasted[row])}`);
    if (table.void[row] !== NONE) lines.push(`its times do not count: ${this.of(table.void[row])}`);
    return lines;
  }

  inHand(hand) {
    return [`iteration ${hand.iteration} · ${hand.order}`, `why: ${hand.reason}`, "in hand: it has begun and not ended"];
  }

  unfinished(group, lane, work) {
    return [`${work.name} ${work.iteration} · ${this.laneText(group, lane)}`,
      work.runs ? "runs, as far as the host can tell" : "in line: enqueued, not begun",
      `enqueued ${lengthText(group.now - work.enqueued)} before now`, this.iterationName(group, work.iteration),
      ...this.workLines(group, work.name, work.iteration)];
  }

  // Of a selected iteration, wherever it is known; null if it is not.
  selected(number) {
    for (const group of this.store.groups) {
      const row = group.rowOf(number), name = group.name ? [group.name] : [];
      if (row !== NONE) return [...name, ...this.iteration(group, row)].join(" · ");
      if (group.inHand && group.inHand.iteration === number) return [...name, ...this.inHand(group.inHand)].join(" · ");
    }
    return null;
  }

  // What the picture holds, in a sentence.
  summary(view) {
    const { store } = this;
    if (store.isEmpty) return "Timeline, empty.";
    const { from, to } = store.extent(), shown = this.shownIterations(view);
    return `Timeline of ${counted(store.numIterations, "iteration")} in ${lengthText(to - from)}`
      + (shown ? `; ${shown} in view.` : ".")
      + " Left and right move, plus and minus zoom, up and down select an iteration, Home shows all, End follows the newest.";
  }

  shownIterations(view) {
    const found = this.store.groups.flatMap((group) => {
      if (!group.iterations) return [];
      const [first, behind] = group.iterations.visible(view.from, view.to);
      return Array.from(group.iterations.number.subarray(first, behind)).filter((_, at) => group.iterations.till[first + at] >= view.from);
    });
    if (!found.length) return "";
    const low = found.reduce((least, one) => Math.min(least, one)), high = found.reduce((most, one) => Math.max(most, one));
    return low === high ? `iteration ${low}` : `iterations ${low} to ${high}`;
  }
}
