// The requests table.
import { counted, enable, keepChildren, make, makeButton, makeRow, makeTable, milliseconds, rangesText, setAttribute, setCutText, setProperty, setText } from "./panel_make.js";
import { makeSwatch, showHue } from "./panel_hues.js";
import { makeTokens, roomFor, showTokens } from "./panel_tokens.js";

const REQUEST_COLUMNS = [
  ["request", "wb-col-id"],
  ["state", "wb-col-state"],
  ["row", "wb-col-row wb-number", "Row of the request table"],
  ["prompt", "wb-col-count wb-number", "Prompt tokens"],
  ["skipped", "wb-col-count wb-number", "Tokens that a cached prefix spared it when it was admitted last"],
  ["output", "wb-col-output wb-number", "Output tokens, of the most there may be"],
  ["KV", "wb-col-count wb-number", "Tokens whose keys and values are cached"],
  ["blocks", "wb-col-blocks", "KV blocks held, in order"],
  ["newest output", "wb-col-tokens", "The newest tokens, the last one marked; why the request waits, or how it ended"],
  ["queue ms", "wb-col-time wb-number", "From arrival to the first schedule, in milliseconds"],
  ["TTFT ms", "wb-col-time wb-number", "From arrival to the first token, in milliseconds"],
  ["TPOT ms", "wb-col-time wb-number", "Per output token behind the first, in milliseconds"],
  ["", "wb-col-act"],
];

const MOST_RANGES = 40;  // characters of the blocks' column, which has room for fewer: the rest grows in a run, and nobody sees it

export class RequestsPane {
  constructor(part) {
    this.part = part;
    const { table, body } = makeTable("Requests", REQUEST_COLUMNS);
    this.table = table;
    this.body = body;
    this.room = Infinity;  // token boxes that a row has room for, at most
    this.shown = null;
    this.left = make("div", { className: "wb-left-out" });
    this.legend = make("div", { className: "wb-draft-legend", hidden: true, attributes: { "aria-label": "Drafts in the newest output" } },
      make("i", { textContent: "a", attributes: { "data-draft": "accepted", "aria-hidden": "true" } }), "accepted draft",
      make("i", { textContent: "a", attributes: { "aria-hidden": "true" } }), "the model's own draw",
      make("i", { textContent: "a", attributes: { "data-draft": "instead", "aria-hidden": "true" } }), "drawn instead of a draft",
      make("span", { className: "wb-rejected", attributes: { "aria-hidden": "true" } }, make("s", { textContent: "a" })), "draft turned down last");
    this.content = [make("div", { className: "wb-scroll", tabIndex: 0, attributes: { role: "region", "aria-label": "Requests" } }, table, this.legend, this.left)];
    this.watchRoom(part.signal);
  }

  // A column of another width has room for more boxes, or fewer.
  watchRoom(signal) {
    const sizes = new ResizeObserver(([{ contentRect }]) => {
      const room = contentRect.width ? roomFor(contentRect.width) : Infinity;
      if (room === this.room) return;
      this.room = room;
      if (this.shown) this.show(this.shown);
    });
    sizes.observe(this.table.querySelector("th.wb-col-tokens"));
    signal.addEventListener("abort", () => sizes.disconnect());
  }

  isEmpty({ rows }) { return rows.length === 0; }

  show(view) {
    const { rows, left_out: leftOut } = view;
    this.shown = view;
    setAttribute(this.table, "data-uncached", rows.every((row) => row.cached_tokens === null) ? "true" : null);
    setProperty(this.legend, "hidden", !rows.some((row) => row.drafts));
    keepChildren(this.body, rows, (row) => row.request_id, (row) => this.makeRow(row.request_id), (line, row) => this.showRow(line, row));
    setText(this.left, leftOut ? `${counted(leftOut, "more request")}, waiting or ended, not listed` : "");
    setProperty(this.left, "hidden", !leftOut);
  }

  makeRow(requestId) {
    const line = makeRow(REQUEST_COLUMNS), { cells } = line, name = make("span", { className: "wb-id" });
    cells[0].append(makeSwatch(), name);
    setCutText(name, requestId);
    cells[1].append(make("span", { className: "wb-chip" }));
    cells[8].append(make("div", { className: "wb-output" }, makeTokens(), make("span", { className: "wb-why-cell" })));
    cells[12].append(makeButton("Abort", `Abort ${requestId}`, () => this.part.command("abort", { request_id: requestId }), { name: `Abort ${requestId}`, className: "wb-small" }));
    return line;
  }

  // Of a row that has not changed there is nothing to do: in a run that is most of them.
  showRow(line, row) {
    const { cells } = line;
    if (line.shownRow === row && line.shownRoom === this.room) return;
    Object.assign(line, { shownRow: row, shownRoom: this.room });
    showHue(cells[0].firstChild, row.hue);
    showState(cells[1].firstChild, row);
    setText(cells[2], row.row === null ? "–" : row.row);
    setText(cells[3], row.prompt_tokens);
    setText(cells[4], row.cached_tokens || "–");
    setText(cells[5], `${row.output_tokens}/${row.max_tokens}`);
    setProperty(cells[5], "title", [`${row.output_tokens} of at most ${row.max_tokens}`, row.drafts].filter(Boolean).join("; "));
    setText(cells[6], row.kv_len);
    const ranges = rangesText(row.blocks);
    setText(cells[7], ranges.slice(0, MOST_RANGES) || "–");
    setProperty(cells[7], "title", ranges ? `${counted(row.blocks.length, "block")}: ${ranges}` : "");
    showTokens(cells[8].firstChild.firstChild, row, this.room);
    setCutText(cells[8].firstChild.lastChild, row.why);
    for (const [at, name] of [[9, "queue_ms"], [10, "ttft_ms"], [11, "tpot_ms"]]) showTime(cells[at], row[name], row);
    enable(cells[12].firstChild, row.can_abort);
    setAttribute(line, "data-state", row.state);
  }
}

// Of a row whose forward is pending: a dot behind the state.
function showState(chip, { state, in_pending: isPending }) {
  setText(chip, isPending ? `${state} ●` : state);
  setAttribute(chip, "data-state", state);
  setProperty(chip, "title", isPending ? `${state}; the pending forward computes its next token` : state);
}

function showTime(cell, value, { is_void: isVoid, why_void: why }) {
  setText(cell, milliseconds(value));
  setAttribute(cell, "data-void", isVoid && value !== null ? "true" : null);
  setProperty(cell, "title", isVoid && value !== null ? `does not count: ${why}` : "");
}
