// Captured sizes: how often each was replayed, what it cost in padding, and why others were not.
import { counted, fillChildren, keepChildren, make, makeRow, makeTable, percent, setAttribute, setCutText, setStyle, setProperty, setText } from "./panel_make.js";

const GRAPH_COLUMNS = [
  ["captured size", "wb-col-name"],
  ["tokens", "wb-col-count wb-number"],
  ["prefill rows", "wb-col-wide wb-number"],
  ["decode rows", "wb-col-wide wb-number"],
  ["hits", "wb-col-bar", "Iterations that replayed it"],
  ["", "wb-col-count wb-number"],
  ["padding tokens", "wb-col-wide wb-number", "Tokens computed only to fill it, all hits together"],
  ["per hit", "wb-col-count wb-number", "Padding tokens a hit"],
];

export class GraphsPane {
  constructor() {
    const { table, body } = makeTable("Captured sizes", GRAPH_COLUMNS);
    this.body = body;
    this.facts = make("dl", { className: "wb-facts-row" });
    this.missHead = make("div", { className: "wb-title" });
    this.misses = make("ul", { className: "wb-bars" });
    this.memory = make("div", { className: "wb-soft" });
    this.content = [make("div", { className: "wb-pane-head" }, this.facts, this.memory),
      make("div", { className: "wb-scroll wb-graphs", tabIndex: 0, attributes: { role: "region", "aria-label": "Captured sizes and misses" } }, table,
        make("div", { className: "wb-misses" }, this.missHead, this.misses))];
  }

  isEmpty({ graphs, hits, misses }) { return graphs.length === 0 && hits === 0 && Object.keys(misses).length === 0; }

  show(view) {
    const most = Math.max(1, ...view.graphs.map((one) => one.hits));
    keepChildren(this.body, view.graphs, (one) => one.name, makeGraph, (line, one) => showGraph(line, one, most));
    fillChildren(this.facts, factsOf(view), () => make("div", {}, make("dt"), make("dd")), (item, [name, value]) => {
      setText(item.firstChild, name);
      setText(item.lastChild, value);
    });
    setText(this.memory, view.memory);
    this.showMisses(Object.entries(view.misses));
  }

  showMisses(misses) {
    const most = Math.max(1, ...misses.map(([, count]) => count));
    setText(this.missHead, misses.length ? "ran eagerly because" : "nothing ran eagerly");
    keepChildren(this.misses, misses, ([reason]) => reason, () => make("li", {}, make("span"), makeMeter(), make("b")), (item, [reason, count]) => {
      setText(item.children[0], reason);
      setStyle(item.children[1].firstChild, "width", `${100 * count / most}%`);
      setText(item.children[2], count.toLocaleString("en"));
    });
  }
}

function factsOf({ label, graphs, hits, misses, deferrals, padding_share: padding }) {
  const missed = Object.values(misses).reduce((sum, count) => sum + count, 0), all = hits + missed;
  const waits = deferrals === null ? [] : [["graph waits", counted(deferrals, "iteration")]], awaited = graphs.find((one) => one.awaited_by);
  if (awaited) waits.push(["waits now", `${awaited.awaited_by} for ${awaited.name}`]);
  return [
    [`${label} hits`, all ? `${hits.toLocaleString("en")} of ${all.toLocaleString("en")} (${percent(hits / all)})` : "0"],
    ["misses", missed.toLocaleString("en")],
    ...waits,
    ["padding", padding === null ? "–" : `${percent(padding)} of tokens`],
  ];
}

function makeMeter() { return make("span", { className: "wb-meter", attributes: { "aria-hidden": "true" } }, make("i")); }

function makeGraph() {
  const line = makeRow(GRAPH_COLUMNS);
  line.cells[0].append(make("span"), make("span", { className: "wb-pending", textContent: "pending", title: "The pending forward replays it" }), make("span", { className: "wb-awaited" }));
  line.cells[4].append(makeMeter());
  return line;
}

function showGraph({ cells }, graph, most) {
  setText(cells[0].firstChild, graph.name);
  setProperty(cells[0].children[1], "hidden", !graph.is_pending);
  setProperty(cells[0].lastChild, "hidden", !graph.awaited_by);
  setCutText(cells[0].lastChild, graph.awaited_by && `${graph.awaited_by} waits`);
  setText(cells[1], graph.num_tokens);
  setText(cells[2], graph.num_prefill);
  setText(cells[3], graph.num_decode);
  setStyle(cells[4].firstChild.firstChild, "width", `${100 * graph.hits / most}%`);
  setText(cells[5], graph.hits.toLocaleString("en"));
  setText(cells[6], graph.padding_tokens.toLocaleString("en"));
  setText(cells[7], graph.hits ? (graph.padding_tokens / graph.hits).toLocaleString("en", { maximumFractionDigits: 1 }) : "–");
  setAttribute(cells[0].parentElement, "data-unused", graph.hits ? null : "true");
}
