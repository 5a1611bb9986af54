// The tabs and panes' front-end. Traits come from workbench/widgets/panel_panes.py; what is sent is Command of
// workbench/panel/messages.py.
import { make, setProperty, setText } from "./panel_make.js";
import { Part, ROWS } from "./panel_part.js";
import { TabBar } from "./panel_tabs.js";
import { withNews } from "./panel_row_news.js";
import { RequestsPane } from "./panel_requests.js";
import { BlocksPane } from "./panel_blocks.js";
import { GraphsPane } from "./panel_graphs.js";
import { ExpertsPane } from "./panel_experts.js";
import { ChangesPane } from "./panel_changes.js";
import { HistoryPane } from "./panel_history.js";
import { StopsPane } from "./panel_stops.js";
import { LogPane } from "./panel_log.js";

// The pane of a tab, and the trait that it shows.
const PANES = {
  requests: [RequestsPane, "requests"],
  blocks: [BlocksPane, "blocks"],
  graphs: [GraphsPane, "graphs"],
  experts: [ExpertsPane, "experts"],
  changes: [ChangesPane, "changes"],
  history: [HistoryPane, "history"],
  stops: [StopsPane, "stops"],
  log: [LogPane, "events"],
};

class Panes extends Part {
  constructor(model, el) {
    super(model, el, "wb-panel-panes", "Views of the session");
    this.carried = {};  // news of the requests that came with the bar
    this.tabs = new TabBar((name) => this.choose(name));
    this.panes = new Map(Object.entries(PANES).map(([name, [Pane, trait]]) => [name, this.makePane(name, new Pane(this), trait)]));
    this.area = make("div", { className: "wb-area" }, ...[...this.panes.values()].map(({ box }) => box));
    this.root.prepend(this.tabs.bar, this.area);
    this.follow("tabs", (names) => this.setTabs(names));
    this.follow("tab", () => this.showTab());
    for (const [name, { trait }] of this.panes) this.follow(trait, () => this.showPane(name));
    this.follow("requests_news", () => this.showPane("requests"));
    this.hear(ROWS, (news) => { this.carried = news; this.showPane("requests"); });
    this.root.panelPanes = this;
  }

  makePane(name, pane, trait) {
    const empty = make("div", { className: "wb-empty wb-empty-pane" }), content = make("div", { className: "wb-content" }, ...pane.content);
    const box = make("div", { id: this.tabs.paneId(name), className: `wb-pane wb-pane-${name}`, attributes: { role: "tabpanel", "aria-labelledby": this.tabs.tabId(name) } }, empty, content);
    return { pane, trait, box, empty, content };
  }

  choose(name) {
    if (this.model.get("tab") === name) return;
    this.model.set("tab", name);
    this.model.save_changes();
  }

  setTabs(names) {
    this.tabs.setTabs(names);
    this.tabs.show(this.model.get("tab"));
  }

  showTab() {
    const tab = this.model.get("tab");
    this.tabs.show(tab);
    setProperty(this.area, "hidden", !this.panes.has(tab));
    for (const [name, { box }] of this.panes) setProperty(box, "hidden", name !== tab);
    if (this.panes.has(tab)) this.showPane(tab);
  }

  // Only the pane in view is worked on: the others catch up when they are chosen.
  showPane(name) {
    if (this.model.get("tab") !== name) return;
    const { pane, trait, empty, content } = this.panes.get(name), sent = this.model.get(trait);
    const view = name === "requests" ? withNews(sent, this.model.get("requests_news"), this.carried) : sent;
    const isSent = Object.keys(view).length > 0, isEmpty = !isSent || pane.isEmpty(view);
    setText(empty, isSent ? view.hint : "…");
    setProperty(empty, "hidden", !isEmpty);
    setProperty(content, "hidden", isEmpty);
    if (!isEmpty) pane.show(view);
  }
}

export default {
  render({ model, el }) {
    const panes = new Panes(model, el);
    return () => panes.destroy();
  },
};
