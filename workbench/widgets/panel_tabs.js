// A bar of tabs as ARIA's authoring practices want it: one tab stop, arrow keys move and choose.
import { make, makeId, setAttribute, setProperty } from "./panel_make.js";

const TAB_NAMES = {
  requests: ["Requests", "Each request: state, tokens, blocks, times"],
  blocks: ["KV blocks", "The block pool, block by block"],
  graphs: ["Graphs", "Captured sizes: hits, misses, padding"],
  experts: ["Experts", "Tokens sent to each expert of each layer"],
  changes: ["Read / wrote", "What each phase read, wrote and launched"],
  history: ["History", "Any past iteration"],
  figures: ["Figures", "Latency, throughput, hidden share, bubbles"],
  stops: ["Breakpoints", "Where runs stand still"],
  log: ["Events", "What happened, in order"],
};

export class TabBar {
  constructor(choose) {
    this.choose = choose;
    this.prefix = makeId();
    this.tabs = new Map();
    this.bar = make("div", { className: "wb-tabs", attributes: { role: "tablist", "aria-label": "Views" } });
    this.bar.addEventListener("keydown", (event) => this.key(event));
  }

  // The ids by which a tab and its pane name each other.
  tabId(name) { return `${this.prefix}-tab-${name}`; }
  paneId(name) { return `${this.prefix}-pane-${name}`; }

  setTabs(names) {
    this.tabs = new Map(names.map((name) => [name, this.makeTab(name)]));
    this.bar.replaceChildren(...this.tabs.values());
  }

  makeTab(name) {
    const [textContent, title] = TAB_NAMES[name] || [name, name];
    const tab = make("button", { type: "button", id: this.tabId(name), title, textContent, attributes: { role: "tab", "aria-controls": this.paneId(name) } });
    tab.addEventListener("click", () => this.choose(name));
    return tab;
  }

  show(chosen) {
    for (const [name, tab] of this.tabs) {
      setAttribute(tab, "aria-selected", String(name === chosen));
      setProperty(tab, "tabIndex", name === chosen ? 0 : -1);
    }
  }

  key(event) {
    const names = [...this.tabs.keys()], at = names.findIndex((name) => this.tabs.get(name) === event.target);
    const places = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: names.length - 1 };
    if (at < 0 || !(event.key in places) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const name = names[(places[event.key] + names.length) % names.length];
    this.choose(name);
    this.tabs.get(name).focus();
  }
}
