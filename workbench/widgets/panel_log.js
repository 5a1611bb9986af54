// Events, the newest first.
import { counted, countedKeys, keepChildren, make, makeRow, makeTable, setAttribute, setCutText, setProperty, setText } from "./panel_make.js";

const EVENT_COLUMNS = [["iteration", "wb-col-count wb-number", "Iterations begun by then"], ["event", "wb-col-kind"], ["", "wb-col-text"]];

export class LogPane {
  constructor() {
    const { table, body } = makeTable("Events", EVENT_COLUMNS);
    this.body = body;
    this.left = make("div", { className: "wb-left-out" });
    this.content = [make("div", { className: "wb-scroll", tabIndex: 0, attributes: { role: "region", "aria-label": "Events" } }, table, this.left)];
  }

  isEmpty({ rows }) { return rows.length === 0; }

  show({ rows, left_out: leftOut }) {
    const oldestFirst = [...rows].reverse(), keys = countedKeys(oldestFirst, ({ iteration, kind, text }) => `${iteration} ${kind} ${text}`);
    const keyed = oldestFirst.map((row, place) => ({ ...row, key: keys[place] })).reverse();
    keepChildren(this.body, keyed, (row) => row.key, makeEvent, showEvent);
    setText(this.left, leftOut ? `${counted(leftOut, "older event")} not listed` : "");
    setProperty(this.left, "hidden", !leftOut);
  }
}

function makeEvent() {
  const line = makeRow(EVENT_COLUMNS);
  line.cells[1].append(make("span", { className: "wb-chip" }));
  return line;
}

function showEvent({ cells }, { iteration, kind, text }) {
  setText(cells[0], iteration.toLocaleString("en"));
  setText(cells[1].firstChild, kind);
  setAttribute(cells[1].firstChild, "data-kind", kind);
  setCutText(cells[2], text);
}
